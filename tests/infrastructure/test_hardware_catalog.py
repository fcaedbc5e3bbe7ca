"""The shipped catalog: every number has a source and a date, units are right, names are found, users override."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import craton.infrastructure
from craton.infrastructure import CatalogError
from craton.infrastructure.catalog import entry, gpu, gpus, instance, instances, load_catalog

FOLDER = Path(craton.infrastructure.__file__).parent / "catalog"


def shipped(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def statements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number, word and price the shipped files state, with where it stands."""
    for file in ("gpus", "instances", "storage"):
        for section, entries in shipped(file).items():
            for name, table in entries.items():
                for key, value in table.items():
                    if key == "prices":
                        yield from ((f"{section}.{name}.prices.{price['kind']}", price) for price in value)
                    elif key not in ("aliases", "notes"):
                        yield f"{section}.{name}.{key}", value


def test_every_number_has_a_known_source_and_a_date() -> None:
    sources = shipped("sources")["sources"]
    found = dict(statements())
    assert len(found) > 400
    for where, stated in found.items():
        assert isinstance(stated, dict), f"{where} is a bare value"
        assert stated.get("source") in sources, f"{where}: source {stated.get('source')!r}"
        assert isinstance(stated.get("date"), date), f"{where} has no date"
        assert stated["date"] <= date(2026, 11, 15), f"{where} is dated in the future"


def test_every_source_is_used() -> None:
    used = {stated["source"] for _, stated in statements()}
    assert set(shipped("sources")["sources"]) == used


def test_p5_units() -> None:
    p5 = instance("p5.48xlarge")
    assert p5.network_bytes_per_second == 400e9  # 3200 Gb/s
    assert p5.network_interfaces == 32
    assert p5.efa_version == 2
    assert p5.gpu.nvlink_bytes_per_second == 450e9  # one direction of 900
    assert p5.gpu.flops["bf16"] == 989.5e12
    assert p5.host_memory_bytes == 2048 * 2**30
    assert p5.nvme_bytes == pytest.approx(30.4e12)
    assert p5.host_link == "pcie4"
    assert instance("p5en.48xlarge").host_link == "pcie5"
    assert instance("p5en.48xlarge").host_link_bytes_per_second == 2 * p5.host_link_bytes_per_second + 1e9


def test_memory_is_what_the_driver_reports() -> None:
    assert gpu("B300").memory_bytes == 275040 * 2**20
    assert gpu("B200").memory_bytes == 183359 * 2**20
    assert gpu("H100-SXM").memory_bytes < 80 * 2**30
    assert gpu("B300").nvlink_bytes_per_second == 900e9
    assert gpu("B300").flops["fp4"] == 13.1e15  # the cautious one of five published values


def test_ultraservers() -> None:
    tray, server = instance("p6e-gb200.36xlarge"), instance("u-p6e-gb200x72")
    assert (tray.num_gpus, tray.nvlink_domain_gpus) == (4, 72)
    assert server.num_gpus == 18 * tray.num_gpus
    assert server.network_bytes_per_second == 18 * tray.network_bytes_per_second == 3600e9
    assert server.host_memory_bytes == 18 * tray.host_memory_bytes
    assert server.prices[0].dollars_per_hour == pytest.approx(18 * tray.prices[0].dollars_per_hour)
    assert tray.host_link_bytes_per_second == 225e9  # C2C: 900 both ways, for two GPUs


def test_numbers_are_plausible_together() -> None:
    for card in gpus():
        for precision, best in card.achievable_flops.items():
            assert 0.5 * card.flops[precision] < best < card.flops[precision], card.name
        if "fp8" in card.flops:
            assert card.flops["fp8"] == pytest.approx(2 * card.flops["bf16"], rel=0.02)
    for node in instances():
        assert node.nvlink_domain_gpus == 1 or node.gpu.nvlink_bytes_per_second > 0, node.name
        by_kind = {price.kind: price.dollars_per_hour for price in node.prices}
        if {"on-demand", "spot"} <= set(by_kind):
            assert by_kind["spot"] < by_kind["on-demand"], node.name


def test_the_issue_s_hardware_is_there() -> None:
    cards = {"A100-40-SXM", "A100-80-SXM", "H100-SXM", "H200-SXM", "B200", "B300", "GB200", "GB300", "L40S", "A10G"}
    assert cards | {"V100-SXM", "H800-SXM", "H100-SXM-96-500W"} <= {card.name for card in gpus()}
    generations = {"volta", "ampere", "ada", "hopper", "blackwell", "blackwell-ultra"}
    assert {card.generation for card in gpus()} == generations


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("h100", "H100-SXM"), ("H100-SXM (p5.48xlarge)", "H100-SXM"), ("a100", "A100-80-SXM"), (" gb200 ", "GB200")],
)
def test_aliases_and_case(spelling: str, name: str) -> None:
    assert gpu(spelling).name == name


def test_unknown_name_gives_the_nearest_and_the_list() -> None:
    with pytest.raises(
        CatalogError, match=r"unknown instance 'p5en\.48xlrage'.*did you mean 'p5en\.48xlarge'"
    ) as error:
        instance("p5en.48xlrage")
    assert "p6-b200.48xlarge" in str(error.value)
    with pytest.raises(CatalogError, match=r"unknown instance 'lcoal'.*did you mean 'local'"):
        instance("lcoal")
    with pytest.raises(CatalogError, match="unknown GPU 'TPU'"):
        gpu("TPU")


# -- the user's own file ------------------------------------------------------------------------------------------


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text("")
    monkeypatch.setenv("CRATON_CATALOG", str(path))
    return path


def test_overriding_one_number_keeps_the_rest(user_file: Path) -> None:
    before = instance("p5.48xlarge")
    user_file.write_text('[gpus.H100-SXM]\nbf16_tflops = 900\n[instances."p5.48xlarge"]\nvcpus = 190\n')
    after = instance("p5.48xlarge")
    assert (after.gpu.flops["bf16"], after.vcpus) == (900e12, 190)
    assert after.gpu.flops["fp8"] == before.gpu.flops["fp8"]
    assert after.gpu.memory_bytes == before.gpu.memory_bytes
    assert after.prices == before.prices
    fact = entry("gpus", "h100").facts["bf16_tflops"]
    assert fact.source == str(user_file)
    assert fact.date is not None
    assert entry("gpus", "h100").overridden_by == str(user_file)


def test_overriding_a_price_replaces_its_kind_only(user_file: Path) -> None:
    user_file.write_text(
        '[instances."p5.48xlarge"]\n'
        'prices = [{ kind = "on-demand", dollars_per_hour = 40, source = "our contract", date = 2026-11-01 }]\n'
    )
    prices = {price.kind: price for price in instance("p5.48xlarge").prices}
    assert prices["on-demand"].dollars_per_hour == 40
    assert (prices["on-demand"].source, prices["on-demand"].date) == ("our contract", date(2026, 11, 1))
    assert prices["spot"].dollars_per_hour == 20.6424


def test_a_changed_file_is_read_again(user_file: Path) -> None:
    user_file.write_text("[gpus.L40S]\nbf16_tflops = 300\n")
    assert gpu("L40S").flops["bf16"] == 300e12
    user_file.write_text("[gpus.L40S]\nbf16_tflops = 310\npower_watts = 325\n")
    assert gpu("L40S").flops["bf16"] == 310e12


def test_adding_own_hardware(user_file: Path) -> None:
    user_file.write_text(
        """
        [sources]
        bench = "our own benchmark, rack 7"

        [gpus.MI300X]
        aliases = ["mi300"]
        generation = "cdna3"
        memory_mib = 196288
        memory_terabytes_per_second = 5.3
        bf16_tflops = { value = 1307, source = "bench", date = "2026-10-01", note = "dense" }

        [instances.rack7]
        gpu = "mi300"
        num_gpus = 8
        nvlink_domain_gpus = 1
        host_link = "pcie5"
        network_gigabits_per_second = 3200
        host_memory_gib = 2048
        """
    )
    node = instance("RACK7")
    assert node.gpu.name == "MI300X"
    assert node.network_bytes_per_second == 400e9
    assert node.prices == ()
    assert entry("gpus", "mi300").facts["bf16_tflops"].source == "our own benchmark, rack 7"


def test_config_folder_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "config" / "craton" / "catalog.toml"
    path.parent.mkdir(parents=True)
    path.write_text("[gpus.L40S]\nbf16_tflops = 1\n")
    assert load_catalog().user_file == path
    assert gpu("L40S").flops["bf16"] == 1e12


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gpus.L40S]\nbf16_tflop = 1\n", r"gpus\.L40S\.bf16_tflop: unknown key; .*did you mean 'bf16_tflops'"),
        ('[gpus.L40S]\nbf16_tflops = "fast"\n', r"gpus\.L40S\.bf16_tflops: must be a number in TFLOP/s, not 'fast'"),
        ("[gpus.L40S]\nbf16_tflops = -1\n", r"gpus\.L40S\.bf16_tflops: must be a number in TFLOP/s above 0, not -1"),
        ("[gpus.L40S]\nbf16_tflops = nan\n", r"bf16_tflops: must be a number"),
        ("[gpus.L40S]\nbf16_tflops = true\n", r"bf16_tflops: must be a number"),
        ("[gpus.L40S]\nbf16_tflops = { source = 'x' }\n", r"gpus\.L40S\.bf16_tflops: has no value"),
        ("[gpus.L40S]\npower_watts = { value = 1, date = 'May' }\n", r"power_watts\.date: must be a date like"),
        ("[gpus.new]\ngeneration = 'hopper'\n", r"gpus\.new: memory_mib, memory_terabytes_per_second missing"),
        ("[gpu.L40S]\n", r"gpu: unknown key; allowed: .*did you mean 'gpus'"),
        ("gpus = 3\n", r"gpus: must be a table, not 3"),
        ("[gpus]\nL40S = 3\n", r"gpus\.L40S: must be a table, not 3"),
        ("[instances.g5x]\nprices = 3\n", r"instances\.g5x\.prices: must be a list of tables"),
        ("[instances.g5x]\nprices = [{ kind = 'cheap' }]\n", r"prices\[0\]\.kind: must be one of on-demand"),
        ("[instances.g5x]\nprices = [{ kind = 'spot' }]\n", r"prices\[0\]\.dollars_per_hour: must be a number"),
        ('[instances."p5.48xlarge"]\ngpu = "H101"\n', r"p5\.48xlarge\.gpu: unknown 'H101'; known: "),
        ('[instances."p5.48xlarge"]\nhost_link = "usb"\n', r"host_link: unknown 'usb'; known: pcie3"),
        ("[gpus.L40S]\naliases = ['h100']\n", r"'h100' already means H100-SXM"),
        ("[gpus.L40S\n", r"not valid TOML: .*line 1"),
    ],
)
def test_bad_entries_name_file_and_key(user_file: Path, text: str, complaint: str) -> None:
    user_file.write_text(text)
    with pytest.raises(CatalogError, match=complaint) as error:
        load_catalog()
    assert str(user_file) in str(error.value)
    assert "\n" not in str(error.value)


def test_named_file_must_exist(user_file: Path) -> None:
    user_file.unlink()
    with pytest.raises(CatalogError, match=r"CRATON_CATALOG names .*mine\.toml, which is not a file"):
        load_catalog()


def test_the_example_of_the_documentation_works(user_file: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "catalog.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[2].split("```")[0]
    user_file.write_text(example)
    assert gpu("MI300X").generation == "cdna3"
    assert instance("p5.48xlarge").nvme_read_bytes_per_second == 38e9
    assert instance("p5.48xlarge").gpu.name == "H100-SXM"
