"""`craton catalog` as a user reads it."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from craton.cli.app import app
from craton.cli.machines import catalog as verb
from craton.infrastructure import CatalogError, local
from craton.infrastructure.microbenchmark import Measurement


class Today(datetime.date):
    """The day these tests take place."""

    @classmethod
    def today(cls) -> Today:
        return cls(2026, 11, 15)


@pytest.fixture(autouse=True)
def _no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CRATON_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verb, "date", Today)


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["catalog", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def row(output: str, name: str) -> str:
    """The table row that begins with a name."""
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split())


def test_overview_counts_every_section() -> None:
    output = shown()
    assert row(output, "gpus").startswith("gpus 13 A100-40-SXM")
    for section in ("instances", "storage", "models", "local"):
        row(output, section)
    assert "~/.config/craton/catalog.toml" in output


def test_p5en_in_the_table_of_instances() -> None:
    output = shown("instances")
    expected = "p5en.48xlarge 8 x H200-SXM 140.4 8 3,200 50 v3 x 16 pcie5 2,048 30.4 63.30 † 54.92 26.92"
    assert row(output, "p5en.48xlarge") == expected
    assert "on-demand prices of 2026-07-20 (118 days ago † old)" in output
    assert "spot prices of 2026-08-22 (85 days ago)" in output


def test_p5en_with_the_source_of_every_number() -> None:
    output = shown("p5en")
    assert row(output, "vCPUs") == "vCPUs 192 1 2026-08-21"
    assert re.search(r"network +3,200 +Gb/s +1 +2026-08-21", output)
    assert "source 1: EC2 DescribeInstanceTypes" in output
    assert "assumption: no published number found" in output
    assert row(output, "on-demand") == "on-demand 63.30 us-east-1 6 2026-07-20 118 † old unchanged on 2026-09-19"
    assert "also called: p5en" in output


def test_gpus() -> None:
    expected = "B300 blackwell-ultra 268.6 8.00 2,250 4,500 13,100 1,769 900 1,400"
    assert row(shown("gpus"), "B300") == expected
    assert row(shown("gpus"), "V100-SXM").startswith("V100-SXM volta 31.7 0.90 125 fp16")


def test_storage() -> None:
    assert row(shown("storage"), "fsx-persistent-2-1000") == "fsx-persistent-2-1000 lustre 1,000 1,000 - - 12.5 12.5 -"
    assert "503 SlowDown" in shown("storage", "s3")


def test_models() -> None:
    assert row(shown("models"), "deepseek-v3").startswith("deepseek-v3 61 7,168 128 / mla 256 / 8 129,280 671B 37.6B")
    assert row(shown("models"), "llama-3.1-8b").startswith("llama-3.1-8b 32 4,096 32 / 8 - 128,256 8.03B all")
    assert "source: meta-llama/Llama-3.1-8B" in shown("models", "llama-3.1-8b")


def test_json_is_complete() -> None:
    document = json.loads(shown("instances", "p5.48xlarge", "--json"))
    assert document["facts"]["network_gigabits_per_second"]["value"] == 3200
    assert document["facts"]["network_gigabits_per_second"]["unit"] == "Gb/s"
    assert document["prices"][0]["date"] == "2026-07-20"
    assert len(json.loads(shown("gpus", "--json"))) == 13
    assert "llama-3.1-8b" in json.loads(shown("--json"))["models"]
    shapes = {shape["name"]: shape for shape in json.loads(shown("models", "--json"))}
    assert shapes["llama-3.1-8b"]["parameters"] == 8030261248


def test_user_entries_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[gpus.L40S]\nbf16_tflops = { value = 300, note = "[rack 7] measured [/]" }\n')
    monkeypatch.setenv("CRATON_CATALOG", str(path))
    assert "gpus.L40S" in shown()
    output = shown("L40S")
    assert "[rack 7] measured [/]" in output
    assert f"set partly or fully by {path}" in output


def test_own_prices_get_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[instances.DGX-H100]\nprices = [{ kind = "own", dollars_per_hour = 12.5, date = 2026-11-01 }]\n')
    monkeypatch.setenv("CRATON_CATALOG", str(path))
    assert row(shown("instances"), "DGX-H100").endswith("30.72 - - - 12.50")
    assert "own prices of 2026-11-01 (14 days ago)" in shown("instances")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["p5enn"], "the catalog has no entry 'p5enn'.*did you mean 'p5en'"),
        (["gpu", "h100"], "unknown section 'gpu'; .*did you mean 'gpus'"),
        (["gpus", "h1000"], "unknown GPU 'h1000'.*did you mean 'h100'"),
        (["models", "llama-9"], "'llama-9' is not a model preset"),
        (["gpus", "--measure"], "--measure requires the section local"),
    ],
)
def test_mistakes_are_user_errors(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        CliRunner().invoke(app, ["catalog", *arguments], catch_exceptions=False)
    assert isinstance(error.value, CatalogError) or "model preset" in str(error.value)


def test_narrow_terminals_lose_columns_and_say_which() -> None:
    from rich.console import Console

    console = Console(width=100)
    (grid, *_) = verb._instances()[1]
    assert isinstance(grid, verb.Grid)
    table, dropped = verb._fit(grid, console)
    assert dropped[0] == "host\nlink"
    assert console.measure(table).maximum <= 100
    assert [column.header for column in table.columns][-3:] == ["on-demand\n$/h", "block\n$/h", "spot\n$/h"]


def test_local_shows_what_was_measured_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measurement(120e9, 60e9, "torch, in a process of its own", 20e9, 5e9, 0.0)
    real = local.local_machine
    monkeypatch.setattr("craton.infrastructure.local_machine", lambda again: real(again, lambda: measured))
    output = shown("local")
    assert row(output, "fp32").startswith("fp32 120 GFLOP/s")
    assert row(output, "bf16") == "bf16 60 GFLOP/s torch, in a process of its own"
    assert row(output, "loopback") == "loopback 5.00 GB/s one TCP connection"
    assert row(output, "measured").endswith("UTC today")
    assert json.loads(shown("local", "--json"))["memory_bytes_per_second"] == 20e9
