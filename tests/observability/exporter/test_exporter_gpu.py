"""GPUs through NVML. The module pynvml is a stand-in (stand_in_nvml.py): what a real driver answers is measured by
`python benchmarks/exporter.py` on a machine that has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from counted_calls import counted_calls
from observability.exporter.exporting import exporting, scrape
from observability.exporter.stand_in_nvml import DriverlessNvml, FakeCard, StandInNvml, eight_cards
from observability.exporter.trees import write_root

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter import NodeExporter
from craton.observability.exporter.gpus import Cards, NvmlCards, gpu, nvml


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "node")


def test_values_have_the_units_of_dcgm(root: Path) -> None:
    with exporting(root, StandInNvml(eight_cards()), leaf="leaf-7") as exporter:
        found = scrape(exporter)
    one = {"gpu": "1"}
    assert found.value("DCGM_FI_DEV_POWER_USAGE", **one) == pytest.approx(612.345)
    assert found.value("DCGM_FI_DEV_FB_USED", **one) == 90000
    assert found.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", **one) == 123_456_789
    assert found.value("DCGM_FI_DEV_POWER_VIOLATION", **one) == 7e9
    assert found.value("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", **one) == 3
    assert found.value("craton_gpu_nvlink_transmitted_bytes_total", **one) == 2**20
    assert found.value("craton_gpu_nvlink_active_links", **one) == 18
    labels, _ = found.rows("DCGM_FI_DEV_GPU_TEMP", **one)[0]
    assert labels == {
        "gpu": "1",
        "UUID": "GPU-000063000",
        "pci_bus_id": "00000000:63:00.0",
        "device": "nvidia1",
        "modelName": "NVIDIA H200",
        "Hostname": "ip-10-0-0-7",
        "node": "ip-10-0-0-7",
        "leaf": "leaf-7",
    }


def test_activity_is_that_between_two_scrapes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "SHORTEST_GPM_SECONDS", 0.0)
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        assert not scrape(exporter).rows("DCGM_FI_PROF_SM_ACTIVE"), "one sample tells of no activity"
        found = scrape(exporter)
    assert found.value("DCGM_FI_PROF_SM_ACTIVE", gpu="0") == pytest.approx(0.91)
    assert found.value("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", gpu="0") == pytest.approx(0.62)
    assert found.value("DCGM_FI_PROF_PCIE_TX_BYTES", gpu="0") == 100 * 2**20


def test_what_a_card_does_not_have_is_missing_and_asked_once(root: Path) -> None:
    cards = eight_cards()
    cards[0].has_gpm = False
    cards[0].refused = {"utilization"}
    del cards[0].fields[pynvml.NVML_FI_DEV_REMAPPED_PENDING]
    stand_in = StandInNvml(cards)
    with exporting(root, stand_in) as exporter:
        first = scrape(exporter)
        stand_in.asked_fields.clear()
        found = scrape(exporter)
    assert not first.rows("DCGM_FI_DEV_GPU_UTIL", gpu="0")
    assert not found.rows("DCGM_FI_DEV_ROW_REMAP_PENDING", gpu="0")
    assert found.value("DCGM_FI_DEV_ROW_REMAP_PENDING", gpu="1") == 0, "told as none, which is not the same as not told"
    assert stand_in.asked_fields.count(pynvml.NVML_FI_DEV_REMAPPED_PENDING) == 7


def test_a_lost_card_is_down_and_the_others_are_served(root: Path) -> None:
    stand_in = StandInNvml(eight_cards())
    with exporting(root, stand_in) as exporter:
        assert scrape(exporter).value("craton_gpus_seen") == 8
        stand_in.cards[3].is_lost = True
        lost = scrape(exporter)
        later = scrape(exporter)
    assert lost.value("craton_gpu_up", gpu="3") == 0
    assert len(lost.rows("DCGM_FI_DEV_GPU_TEMP")) == 7
    assert lost.value("craton_exporter_collector_errors_total", collector="gpu") == 1
    assert later.value("craton_gpus_seen") == 7, "the list is made anew at once"
    assert later.value("craton_gpus_on_bus") == 8


def test_clocks_links_and_what_the_driver_wants(root: Path) -> None:
    cards = eight_cards()
    cards[2].reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap
    cards[2].links_down = {4, 9}
    cards[2].set_field("GET_GPU_RECOVERY_ACTION", pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)
    with exporting(root, StandInNvml(cards)) as exporter:
        found = scrape(exporter)
    held = {labels["reason"] for labels, value in found.rows("craton_gpu_clocks_held", gpu="2") if value}
    assert held == {"hw_thermal_slowdown", "sw_power_cap"}
    assert found.value("craton_gpu_clocks_held_seconds_total", gpu="2", reason="hw_thermal_slowdown") == 1.5
    assert found.value("craton_gpu_nvlink_active_links", gpu="2") == 16
    assert found.value("craton_gpu_nvlink_links", gpu="2") == 18
    assert found.value("craton_gpu_recovery_wanted", gpu="2", action="reboot") == 1
    assert found.value("craton_gpu_recovery_wanted", gpu="2", action="reset") == 0
    assert found.value("craton_gpu_recovery_wanted", gpu="1", action="reboot") == 0


def test_errors_of_blackwells_links_are_summed(root: Path) -> None:
    card = FakeCard(0, "0000:53:00.0")
    card.set_field("NVLINK_COUNT_RCV_ERRORS", 2)  # of each link
    card.set_field("NVLINK_LINK_COUNT", 12)
    with exporting(root, StandInNvml([card])) as exporter:
        assert scrape(exporter).value("DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS") == 24
        found = scrape(exporter)
    assert found.value("DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS") == 24, "links that are not there refuse, the others answer"
    assert found.value("craton_gpu_nvlink_active_links") == 12
    assert not found.rows("DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS")


def test_every_action_of_nvml_has_one_of_ours() -> None:
    numbers = [value for name, value in vars(pynvml).items() if name.startswith("NVML_GPU_RECOVERY_ACTION_")]
    actions = {number: gpu.wanted_action(number) for number in numbers}
    assert actions[pynvml.NVML_GPU_RECOVERY_ACTION_NONE] == "observe"
    assert actions[pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET] == "reset"
    assert actions[pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET] == "reset"
    assert actions[pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT] == "reboot"
    assert gpu.wanted_action(99) == "reboot", "one that nobody has seen is taken seriously"


def test_a_driver_that_comes_later_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "LIST_SECONDS", 0.0)
    is_there = False

    def open_cards() -> NvmlCards:
        return NvmlCards(StandInNvml(eight_cards()) if is_there else DriverlessNvml())

    (root / gpu.DRIVER).unlink()
    exporter = NodeExporter(NodeRoot(root), open_cards=open_cards)
    before = scrape(exporter)
    is_there = True
    after = scrape(exporter)
    exporter.close()
    assert (before.value("craton_gpus_on_bus"), before.value("craton_gpus_seen")) == (8, 0)
    assert before.value("craton_exporter_collector_errors_total", collector="gpu") == 1
    assert after.value("craton_gpus_seen") == 8


def without_a_package() -> NvmlCards:
    raise ImportError("No module named 'pynvml'")


@pytest.mark.parametrize("open_cards", [without_a_package, lambda: NvmlCards(DriverlessNvml())])
def test_who_cannot_ask_says_why_and_nothing_of_cards(
    root: Path, open_cards: Callable[[], Cards], capfd: pytest.CaptureFixture[str]
) -> None:
    """No package, or a container without the driver's devices: the node itself may be well."""
    exporter = NodeExporter(NodeRoot(root), open_cards=open_cards)
    for _ in range(2):
        found = scrape(exporter)
    exporter.close()
    assert found.value("craton_gpus_on_bus") == 8
    assert not found.rows("craton_gpus_seen")
    assert found.value("craton_exporter_collector_errors_total", collector="gpu") == 1
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gpu cannot be read: ")]
    assert len(told) == 1
    assert "pynvml" in told[0] or "Driver Not Loaded" in told[0]


def test_who_is_not_to_ask_fails_at_nothing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with exporting(root, mode="off") as exporter:
        found = scrape(exporter)
    assert not found.rows("craton_gpus_seen")
    assert found.value("craton_exporter_collector_errors_total", collector="gpu") == 0
    assert "gpu" not in capfd.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"run: .*\[observe\]"):
        NvmlCards()


def test_a_scrape_costs_few_calls(root: Path) -> None:
    """Calls of all threads, those of the stand-in for the driver too; the seconds: `benchmarks/exporter.py`."""
    taken = []
    with counted_calls(of_threads=True) as calls, exporting(root, StandInNvml(eight_cards())) as exporter:
        for _ in range(3):
            before = calls.number
            exporter.scrape()
            taken.append(calls.number - before)
    assert max(taken[1:]) < 100_000, taken  # half of it, which takes 20 ms
    assert taken[0] < 300_000, taken


def test_counters_that_cost_much_are_asked_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(nvml.time, "monotonic", lambda: moment)
    driver = StandInNvml(eight_cards())
    cards = NvmlCards(driver)
    listed = cards.list()
    readings = [cards.read(card) for card in listed]
    dear = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
    asked = []
    for _ in range(12):  # a minute of scrapes
        moment += 5.0
        driver.asked_fields.clear()
        assert [cards.read(card)["field.TOTAL_ENERGY_CONSUMPTION"] for card in listed] == [
            reading["field.TOTAL_ENERGY_CONSUMPTION"] for reading in readings
        ]
        asked.append(driver.asked_fields.count(dear))
    assert sum(asked[6:]) == 2 * len(listed)  # every card each quarter of a minute
    assert max(asked) < len(listed)
    cards.close()


def test_nvml_is_given_back(root: Path) -> None:
    cards = NvmlCards(stand_in := StandInNvml(eight_cards()))
    cards.list()
    cards.close()
    assert not stand_in.is_open
