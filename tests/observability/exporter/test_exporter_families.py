"""The table of families, the text they are served as, and the counters file for dcgm-exporter."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest
from observability.exporter.exporting import Scrape, exporting, scrape
from observability.exporter.stand_in_nvml import StandInNvml, eight_cards
from observability.exporter.trees import write_root

from craton.observability.exporter import FAMILIES, dcgm_counters
from craton.observability.exporter.exposition import Page


def test_every_family_says_what_it_is_and_where_that_is_from() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert family.help
        assert family.source
        assert family.date.year >= 2025
        assert len(set(family.labels)) == len(family.labels), name
        assert family.labels[-2:] == ("node", "leaf"), name


def test_what_families_are_read_from_exists_in_nvml() -> None:
    for family in FAMILIES.values():
        kind, _, name = family.nvml.partition(".")
        if kind == "field" or (kind == "links" and name != "active"):
            assert hasattr(pynvml, f"NVML_FI_DEV_{name}"), family.name
        elif kind == "gpm":
            assert hasattr(pynvml, f"NVML_GPM_METRIC_{name}"), family.name


def test_text_survives_the_official_parser() -> None:
    page = Page('a "b"\\c', "")
    text = page.text(
        [
            ("node_load1", (), math.nan),
            ("node_load5", (), math.inf),
            ("node_load15", (), -math.inf),
            ("node_filesystem_size_bytes", ('/dev/"x"', "ext4", "/a\nb"), 1e300),
        ]
    )
    found = Scrape(text)
    assert math.isnan(found.value("node_load1"))
    assert found.value("node_load5") == math.inf
    assert found.value("node_load15") == -math.inf
    labels, value = found.rows("node_filesystem_size_bytes")[0]
    assert value == 1e300
    assert labels == {"device": '/dev/"x"', "fstype": "ext4", "mountpoint": "/a\nb", "node": 'a "b"\\c'}


def test_labels_are_made_once_and_values_every_time() -> None:
    page = Page("n", "leaf-1")
    assert 'node_load1{node="n",leaf="leaf-1"} 1\n' in page.text([("node_load1", (), 1)])
    assert 'node_load1{node="n",leaf="leaf-1"} 2.5\n' in page.text([("node_load1", (), 2.5)])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("kind", ["p5en", "lab-h100"])
def test_promtool_reads_a_whole_node(tmp_path: Path, kind: str) -> None:
    with exporting(write_root(tmp_path, kind), StandInNvml(eight_cards()), leaf="leaf-1") as exporter:
        text = exporter.scrape()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    # 3 is its opinion on names, which are those that dashboards know; 1 is a text it cannot read.
    assert checked.returncode in (0, 3), checked.stderr
    assert "error while linting" not in checked.stderr


def test_all_of_a_node_is_in_the_table(tmp_path: Path) -> None:
    """Every family that a p5en can have is served from a full image, and nothing else."""
    nvml = StandInNvml(eight_cards())
    with exporting(write_root(tmp_path), nvml) as exporter:
        served = scrape(exporter).names()
    assert served <= set(FAMILIES)
    cannot = {
        *(name for name, family in FAMILIES.items() if family.collector in ("fsx", "filesystem", "runs")),
        *(name for name in FAMILIES if name.startswith(("nvme_", "node_infiniband_port", "DCGM_FI_PROF_"))),
        *(name for name in FAMILIES if "sxid" in name or "xid_moment" in name or "NVLINK_COUNT" in name),
        *("DCGM_EXP_XID_ERRORS_COUNT", "craton_gpu_rank_memory_bytes", "node_timex_offset_seconds"),
        *("node_timex_maxerror_seconds", "node_infiniband_link_downed_total"),
        *("node_infiniband_link_error_recovery_total", "node_infiniband_symbol_error_total"),
        *(name for name in FAMILIES if name.startswith("node_memory_")),
    }
    assert set(FAMILIES) - served <= cannot


def counters(*, blackwell: bool) -> dict[str, str]:
    """Field → kind."""
    text = dcgm_counters(blackwell=blackwell)
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))
    assert all(len(row) == 3 for row in rows), "dcgm-exporter refuses any other number of cells"
    return {name: kind.strip() for name, kind, _ in rows}


def test_blackwell_has_counters_of_its_own() -> None:
    """What GB200 does not tell when both are asked for stands in different files."""
    before, blackwell = counters(blackwell=False), counters(blackwell=True)
    of_links = {name for name in FAMILIES if name.startswith("DCGM_FI_DEV_NVLINK_COUNT_")}
    assert of_links <= set(blackwell)
    assert not of_links & set(before)
    assert "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL" not in blackwell
    assert {"DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"} <= set(blackwell)
    of_hopper = {f"DCGM_FI_DEV_NVLINK_ERROR_DL_{name}" for name in ("CRC", "RECOVERY", "REPLAY")}
    assert of_hopper <= set(before) - set(blackwell)
    differing = set(before) ^ set(blackwell)
    assert all("NVLINK" in name or name == "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL" for name in differing)


def test_the_counters_file_turns_on_what_the_default_leaves_out() -> None:
    kinds = counters(blackwell=False)
    assert set(kinds.values()) <= {"gauge", "counter", "label"}
    needed = """DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_THERMAL_VIOLATION DCGM_FI_DEV_ECC_SBE_VOL_TOTAL
        DCGM_FI_DEV_ECC_DBE_VOL_TOTAL DCGM_FI_DEV_ECC_SBE_AGG_TOTAL DCGM_FI_DEV_ECC_DBE_AGG_TOTAL
        DCGM_EXP_XID_ERRORS_COUNT DCGM_EXP_CLOCK_EVENTS_COUNT DCGM_EXP_GPU_HEALTH_STATUS DCGM_EXP_P2P_STATUS
        DCGM_FI_DEV_ROW_REMAP_PENDING DCGM_FI_DEV_ROW_REMAP_FAILURE DCGM_FI_PROF_SM_ACTIVE
        DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL
        DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION"""
    assert set(needed.split()) <= set(kinds)
    assert "DCGM_FI_DEV_XID_ERRORS" not in kinds, "the gauge that never falls back"
