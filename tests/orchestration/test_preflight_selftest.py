"""A self-test that hangs or dies is a finding, names the devices it lost, and takes nothing else with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from infrastructure.node_images import HEALTHY

from craton.infrastructure.probes import NodeRoot
from craton.orchestration.preflight import PreflightFinding, check_compute, diagnose
from craton.orchestration.preflight import selftest as preflight_selftest
from craton.orchestration.preflight.node_check import check_tested
from craton.orchestration.preflight.selftest import run_compute
from craton.orchestration.slurm.doctor import joined

RESULT = """
import json, os, signal, sys
print(json.dumps({"devices": ["cuda:0", "cuda:1"]}), flush=True)
print(json.dumps({"result": {
    "device": "cuda:1", "name": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "hashes": {"matmul_bf16": "aa" * 32},
    "repeats": {"matmul_bf16": 9}, "mismatches": {"matmul_bf16": 0}, "wrong": [], "tflops": {}, "error": "",
}}), flush=True)
"""


@pytest.fixture
def selftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the self-test of a node of two cards, of which only the second comes to its end."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight_selftest, "SELFTEST", "broken_card")
    return tmp_path / "broken_card.py"


def test_a_card_that_hangs_is_named_and_the_other_kept(selftest: Path) -> None:
    selftest.write_text(f"{RESULT}\nprint('{{torn', end='', flush=True)\nsignal.pause()\n", encoding="utf-8")
    devices, (finding,) = run_compute(limit_seconds=2.0)
    assert [device["device"] for device in devices] == ["cuda:1"]
    assert (finding.what, finding.severity) == ("compute", "fail")
    assert finding.evidence == "the self-test did not end within 2 s; without a result: cuda:0"
    assert "torch" not in finding.remedy


def test_a_card_that_kills_the_process_is_named_and_the_rest_of_doctor_kept(selftest: Path) -> None:
    crash = "print('CUDA error: unspecified launch failure', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 11)\n"
    selftest.write_text(f"{RESULT}\n{crash}", encoding="utf-8")
    found = diagnose(compute=True)
    told = {finding.what: finding for finding in reversed(found.findings)}
    assert told["compute"].severity == "fail"
    assert (
        "ended by SIGSEGV: CUDA error: unspecified launch failure; without a result: cuda:0" in told["compute"].evidence
    )
    assert "torch" not in told["compute"].remedy
    assert {"processors", "shared_memory"} <= set(told)
    (entry,) = found.nodes
    assert [device["device"] for device in entry["compute"]] == ["cuda:1"]
    assert [each["evidence"] for each in entry["compute_failed"]] == [told["compute"].evidence]


def test_pairs_that_cannot_be_measured_are_a_finding(selftest: Path) -> None:
    selftest.write_text("import sys\nsys.exit('NCCL error: remote process exited')\n", encoding="utf-8")
    found = diagnose(bandwidth=True)
    (finding,) = [each for each in found.findings if each.what == "bandwidth"]
    assert (finding.severity, found.bandwidth) == ("fail", None)
    assert "NCCL error" in finding.evidence


def test_every_device_of_this_machine_is_tested() -> None:
    devices, failed = run_compute(seconds=0.05)
    assert (failed, [device["error"] for device in devices]) == ([], [""] * len(devices))
    assert all(set(device["hashes"]) >= {"matmul_bf16", "matmul_fp32", "attention_bf16"} for device in devices)
    assert [finding.severity for finding in check_compute({"here": devices})] == ["ok"]


def test_torch_is_named_where_it_is_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is not there')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    devices, (finding,) = run_compute()
    assert (devices, finding.layer, finding.severity) == ([], "ML software", "fail")
    assert "torch cannot be imported: libcudart.so.13 is not there" in finding.evidence
    assert "[train]" in finding.remedy
    command = [sys.executable, "-m", "craton.ml.selftest", "compute"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == preflight_selftest.NO_TORCH


def test_cards_that_torch_does_not_see_are_not_taken_for_tested(tmp_path: Path) -> None:
    root = NodeRoot(HEALTHY["p5"]().write(tmp_path))
    (finding,) = check_tested([{"device": "cpu"}], 8, root)
    assert (finding.severity, "shows 8 GPUs, and torch could use 0" in finding.evidence) == ("fail", True)
    assert check_tested([{"device": f"cuda:{number}"} for number in range(8)], 8, root) == []
    assert check_tested([{"device": "cpu"}], 0, root) == []


def test_a_self_test_that_died_on_a_node_of_many_is_not_lost() -> None:
    died = PreflightFinding("infrastructure", "compute", "fail", "the self-test did not end within 180 s")
    document = {
        "findings": [died.to_json()],
        "nodes": [{"node": "g1", "compute": [], "compute_failed": [died.to_json()]}],
    }
    found, _ = joined(["g1"], [document])
    assert [(finding.node, finding.what, finding.evidence) for finding in found] == [("g1", "compute", died.evidence)]
