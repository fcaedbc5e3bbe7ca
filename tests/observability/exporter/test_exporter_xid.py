"""XIDs as events: from the kernel log in its three forms, and from NVML's events (a stand-in)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from observability.exporter.exporting import Scrape, exporting, scrape
from observability.exporter.stand_in_nvml import FakeCard, StandInNvml, eight_cards
from observability.exporter.trees import full_node
from waiting import wait_until

from craton.infrastructure.probes import NodeRoot, xid_facts
from craton.observability.exporter.gpus import XidCollector
from craton.observability.exporter.gpus import xid as xid_module
from craton.observability.exporter.kernel_lines import Journal, Kmsg, Line, NoLines, RecordedLines

COUNT, MOMENT, WINDOW = "craton_gpu_xid_errors_total", "craton_gpu_xid_moment_seconds", "DCGM_EXP_XID_ERRORS_COUNT"
WANTED = "craton_gpu_recovery_wanted"
REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"


class Log:
    """The kernel log of an image, which tests write on."""

    def __init__(self, root: Path) -> None:
        self._path = root / "commands/dmesg.txt"

    def write(self, text: str, seconds: float = 99_990.0) -> None:
        with self._path.open("a") as log:
            log.write(f"[{seconds:12.6f}] {text}\n")

    def xid(
        self, code: int, bus: str = "0000:63:00", text: str = "pid=1, name=python", seconds: float = 99_990.0
    ) -> None:
        self.write(f"NVRM: Xid (PCI:{bus}): {code}, {text}", seconds)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return full_node("p5en").write(tmp_path / "node")


@pytest.fixture
def log(root: Path) -> Log:
    return Log(root)


def test_what_must_be_seen_is_there_before_it_happens(root: Path, log: Log) -> None:
    """Prometheus sees no increase in a series that is born at 1."""
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        before = scrape(exporter)
        log.xid(79, text="GPU has fallen off the bus.")
        after = scrape(exporter)
    assert before.value(COUNT, gpu="1", xid="79") == 0
    assert after.value(COUNT, gpu="1", xid="79") == 1
    assert after.value(COUNT, gpu="2", xid="79") == 0
    serious = {str(code) for code, fact in xid_facts().items() if fact.action != "observe"}
    assert {labels["xid"] for labels, _ in before.rows(COUNT, gpu="0")} == serious


def test_repeats_and_codes_are_counted(root: Path, log: Log) -> None:
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        scrape(exporter)
        for code in (31, 31, 94, 12345):
            log.xid(code)
        found = scrape(exporter)
        again = scrape(exporter)
    counted = {labels["xid"]: value for labels, value in found.rows(COUNT, gpu="1") if value}
    assert counted == {"31": 2, "94": 1, "12345": 1}
    assert again.rows(COUNT, gpu="1") == found.rows(COUNT, gpu="1"), "a line is read once"


def test_history_has_a_moment_and_is_not_counted(root: Path, log: Log) -> None:
    log.xid(48, seconds=40_000.0)
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        now = time.time()
        found = scrape(exporter)
    assert found.value(COUNT, gpu="1", xid="48") == 0
    assert found.value(MOMENT, gpu="1", xid="48") == pytest.approx(now - 60_000, abs=5)
    assert not found.rows(WINDOW)


def test_a_line_that_is_new_has_happened_now(root: Path, log: Log) -> None:
    """The clock that dates the log runs apart from the system's: by half an hour here, as after some months."""
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        scrape(exporter)
        log.xid(48, seconds=99_990.0 - 1800)
        log.write("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", 99_990.0 - 1800)
        now = time.time()
        found = scrape(exporter)
    assert found.value(MOMENT, gpu="1", xid="48") == pytest.approx(now, abs=5)
    assert found.value(WINDOW, gpu="1", xid="48") == 1
    assert found.value("craton_nvswitch_sxid_moment_seconds", sxid="20034") == pytest.approx(now, abs=5)


def test_the_window_is_that_of_dcgm_exporter_and_falls(root: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.xid(63, seconds=99_900.0)  # 100 s before this moment of the image
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        assert scrape(exporter).value(WINDOW, gpu="1", xid="63", window_size_in_ms="300000") == 1
        monkeypatch.setattr(xid_module, "WINDOW_SECONDS", 50.0)
        assert not scrape(exporter).rows(WINDOW), "nothing is sticky"


def test_an_event_told_twice_is_one_event(root: Path, log: Log) -> None:
    nvml = StandInNvml(eight_cards())
    with exporting(root, nvml) as exporter:
        scrape(exporter)
        log.xid(94)
        nvml.events.append((nvml.cards[1], 94))
        assert scrape(exporter).value(COUNT, gpu="1", xid="94") == 1
        nvml.events.append((nvml.cards[1], 94))
        found = scrape(exporter)
        assert found.value(COUNT, gpu="1", xid="94") == 2, "one that the log does not have"
        log.xid(94)
        assert scrape(exporter).value(COUNT, gpu="1", xid="94") == 2, "and has later"


def test_events_alone_count_where_the_log_may_not_be_read(root: Path) -> None:
    nvml = StandInNvml(eight_cards())
    labels, source = xid_module.CardLabels("host"), xid_module.CardSource(None)
    from craton.observability.exporter.gpus import NvmlCards

    source.cards = NvmlCards(nvml)
    labels.update(source.cards.list())
    labels.occupy({})
    collector = XidCollector(NodeRoot(root), source, labels, lambda _: NoLines())
    nvml.events.append((nvml.cards[5], 48))
    found = {(name, *each): value for name, each, value in collector.collect(time.time())}
    assert found["craton_exporter_kernel_log_readable", "none"] == 0
    assert collector.errors == 1
    assert sum(value for (name, *_), value in found.items() if name == COUNT) == 1


def test_the_driver_s_wish_is_told_until_it_is_loaded_again(root: Path, log: Log) -> None:
    log.xid(154, text=REBOOT)
    with exporting(root, mode="off") as exporter:
        found = scrape(exporter)
        wanted = found.rows("craton_gpu_recovery_wanted", action="reboot")
        assert [(labels["pci_bus_id"], value) for labels, value in wanted] == [("00000000:63:00.0", 1)]
        log.write("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05")
        assert not scrape(exporter).rows("craton_gpu_recovery_wanted")


def test_what_nvml_says_now_is_better_than_what_the_log_said(root: Path, log: Log) -> None:
    log.xid(154, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        assert scrape(exporter).value("craton_gpu_recovery_wanted", gpu="1", action="reset") == 0


def test_what_the_log_wants_is_served_where_nvml_does_not_say(root: Path, log: Log) -> None:
    """A card that was never listed, and one of a driver that does not know the action."""
    cards = eight_cards()
    del cards[1]
    del cards[1].fields[pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    for bus in ("0000:63:00", cards[1].bus.removesuffix(".0"), "0000:53:00"):
        log.xid(154, bus, REBOOT)
    with exporting(root, StandInNvml(cards)) as exporter:
        found = scrape(exporter)
    wanted = {labels["pci_bus_id"] for labels, value in found.rows(WANTED, action="reboot") if value}
    assert wanted == {"00000000:63:00.0", "00000000:73:00.0"}
    assert found.value(WANTED, pci_bus_id="00000000:53:00.0", action="reboot") == 0, "NVML says so"
    assert len(found.rows(WANTED)) == 2 * 8


def test_a_card_that_falls_off_the_bus_keeps_its_labels(root: Path, log: Log) -> None:
    nvml = StandInNvml(eight_cards())
    card = nvml.cards[1]
    labels = {"gpu": "1", "UUID": card.uuid, "pci_bus_id": "00000000:63:00.0"}
    with exporting(root, nvml) as exporter:
        scrape(exporter)
        card.is_lost = True
        log.xid(79, text="GPU has fallen off the bus.")
        log.xid(154, text=REBOOT)
        lost = scrape(exporter)
        gone = scrape(exporter)  # by now the driver was asked for its cards again
        log.xid(119, text="Timeout after 6s of waiting for RPC response")
        later = scrape(exporter)
    assert lost.value("craton_gpu_up", **labels) == 0
    assert not gone.rows("craton_gpu_up", **labels), "the driver does not list it any more"
    for found in (lost, gone, later):
        assert found.value(WANTED, action="reboot", **labels) == 1
        assert found.value(COUNT, xid="79", **labels) == 1
        assert found.rows(MOMENT, xid="79", **labels)
    assert gone.value(COUNT, xid="119", **labels) == 0, "a series that is born at 1 has no increase"
    assert later.value(COUNT, xid="119", **labels) == 1


def test_what_was_wanted_is_over_once_nvml_wants_nothing(root: Path, log: Log) -> None:
    """A reset without loading the driver anew: what the log said before it does not come back when NVML is silent."""
    nvml = StandInNvml(eight_cards())
    card = nvml.cards[1]
    log.xid(154, text=REBOOT)
    with exporting(root, nvml) as exporter:
        scrape(exporter)
        scrape(exporter)
        card.is_lost = True
        assert not [row for row in scrape(exporter).rows(WANTED) if row[1]]


def test_what_the_log_wants_is_served_while_the_driver_hangs(root: Path, log: Log) -> None:
    is_over = threading.Event()

    class Hanging(StandInNvml):
        def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:  # noqa: N802
            is_over.wait(30.0)
            return super().nvmlDeviceGetUtilizationRates(card)

    log.xid(154, text=REBOOT)
    with exporting(root, Hanging(eight_cards())) as exporter:
        exporter._team._answer_seconds = 1.0
        found = scrape(exporter)
        is_over.set()
    assert found.value("craton_exporter_collector_stuck", collector="gpu") == 1
    assert found.value(WANTED, gpu="1", action="reboot") == 1


def test_a_card_that_the_driver_never_had_is_counted_by_its_place(root: Path, log: Log) -> None:
    cards = eight_cards()
    del cards[1]
    with exporting(root, StandInNvml(cards)) as exporter:
        scrape(exporter)
        log.xid(79)
        assert scrape(exporter).value(COUNT, pci_bus_id="00000000:63:00.0", xid="79") == 1


def test_switches_have_series_of_their_own(root: Path, log: Log) -> None:
    log.write("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        before = scrape(exporter)
        log.write("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
        after = scrape(exporter)
    name = "craton_nvswitch_sxid_errors_total"
    assert before.value(name, pci_bus_id="00000000:C1:00.0", sxid="20034", fatal="true") == 0
    assert after.value(name, sxid="20034") == 1


def test_a_boot_starts_the_log_anew(root: Path, log: Log) -> None:
    path = root / "commands/dmesg.txt"
    lines = RecordedLines(NodeRoot(root))
    assert [line.is_history for line in lines.new()] == [True]
    path.write_text("[ 1.0] a\n")
    assert list(lines.new()) == [Line("a", 99_999.0, False)]
    with path.open("a") as torn:
        torn.write("[ 2.0] half")
    assert list(lines.new()) == [], "a line without its end is not one yet"


@pytest.fixture
def kmsg() -> Iterator[tuple[Kmsg, Callable[[str], None]]]:
    """A socket that keeps records apart, as /dev/kmsg does: a read takes one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    yield Kmsg(os.dup(theirs.fileno()), NodeRoot()), lambda text: ours.sendall(text.encode()) and None
    ours.close()
    theirs.close()


def test_records_of_kmsg(kmsg: tuple[Kmsg, Callable[[str], None]]) -> None:
    lines, write = kmsg
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    write(f"4,1,{int((uptime - 50) * 1e6)},-;NVRM: Xid (PCI:0000:53:00): 79, GPU has fallen off\n SUBSYSTEM=pci\n")
    write("6,2,bad")
    found = list(lines.new())
    assert found[0].text == "NVRM: Xid (PCI:0000:53:00): 79, GPU has fallen off"
    assert found[0].age_seconds == pytest.approx(50, abs=5)
    assert all(line.is_history for line in found), "what was there when it was opened"
    write("4,3,1,-;NVRM: Xid (PCI:0000:53:00): 31, fault\n")
    assert [(line.text[-5:], line.is_history) for line in lines.new()] == [("fault", False)]
    assert list(lines.new()) == []
    lines.close()


def test_the_journal_is_followed_without_waiting(tmp_path: Path) -> None:
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    program = tmp_path / "journalctl"
    more = tmp_path / "more"
    program.write_text(
        f"#!/bin/sh\necho '[{uptime - 500:.6f}] host kernel: NVRM: Xid (PCI:0000:53:00): 79, old'\n"
        f"while [ ! -e {more} ]; do sleep 0.02; done\n"
        f"echo '[{uptime + 3600:.6f}] host kernel: NVRM: Xid (PCI:0000:53:00): 31, new'\nexec sleep 60\n"
    )
    program.chmod(0o755)
    lines = Journal([str(program)], NodeRoot())
    try:
        assert wait_until(lambda: list(lines.new()))[0].is_history
        more.touch()
        new = wait_until(lambda: list(lines.new()))
        assert new[0].text.endswith("31, new")
        assert not new[0].is_history
    finally:
        lines.close()


def test_a_journal_that_ends_is_an_error_and_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(xid_module, "REOPEN_SECONDS", 100.0)
    opened = []

    class Ended(NoLines):
        def close(self) -> None:
            opened.append("closed")

    def open_lines(_: NodeRoot) -> NoLines:
        opened.append("opened")
        return Ended()

    labels, source = xid_module.CardLabels("host"), xid_module.CardSource(None)
    labels.are_known.set()
    collector = XidCollector(NodeRoot(root), source, labels, open_lines)
    for now in (1000.0, 1005.0, 1101.0):
        list(collector.collect(now))
    assert opened == ["opened", "closed", "opened"]
    assert collector.errors == 2
    assert capfd.readouterr().err.count("run as root, or with CAP_SYSLOG") == 1, "what stays so is said once"


def test_the_text_of_a_scrape_has_no_sticky_gauge(root: Path, log: Log) -> None:
    log.xid(79)
    with exporting(root, StandInNvml(eight_cards())) as exporter:
        found: Scrape = scrape(exporter)
    assert "DCGM_FI_DEV_XID_ERRORS" not in found.names()
