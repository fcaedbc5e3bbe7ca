"""How often Slurm may start a run again: what goes on is not counted, what goes nowhere is. And a pre-flight that
blames the job's own software ends it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_runs import chain_job, last_words

from craton.orchestration.draft import draft_run
from craton.orchestration.slurm import SCRIPT_FILE, batch, checks
from craton.orchestration.slurm.checks import software_failure
from craton.orchestration.slurm.starts import Starts, may_start_again, next_start, read_starts, write_starts
from craton.orchestration.slurm.step import SlurmStep
from craton.telemetry import RunDirectory

NONCE = "0123456789abcdef"


def chained(steps: list[int], restarts: int, failing: bool = False) -> int:
    """How many starts a run gets that ends at these steps, one after the other."""
    starts = None
    for number, step in enumerate(steps, start=1):
        starts = next_start(starts, NONCE, 0 if number == 1 else steps[number - 2])
        assert starts.number == number
        starts = replace(starts, has_failed=failing)
        if not may_start_again(starts.spent(step), restarts):
            return number
    return len(steps)


def test_a_long_chain_of_time_limit_slices_is_never_given_up() -> None:
    slices = [100 * number for number in range(1, 501)]
    assert chained(slices, restarts=10) == 500
    assert chained(slices, restarts=1) == 500


def test_starts_that_come_no_further_are_given_up() -> None:
    assert chained([100] * 50, restarts=10) == 12, "the first came further"
    assert chained([0] * 50, restarts=10) == 11
    assert chained([0] * 50, restarts=1) == 2
    assert chained([100, 60, 60, 200, 60, 60, 60], restarts=3) == 6, "what was done again is not further"


def test_starts_that_fail_are_counted_however_far_they_come() -> None:
    assert chained(list(range(1, 50)), restarts=10, failing=True) == 11


def test_a_run_without_restarts_has_one_start() -> None:
    assert chained([100, 200, 300], restarts=0) == 1


def test_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "chain")
    assert read_starts(run) is None
    last = Starts(NONCE, 100, 10, True)
    write_starts(run, last)
    assert read_starts(run) == last
    assert next_start(last, NONCE, 100) == Starts(NONCE, 100, 11, number=2)
    assert next_start(last, "another", 100) == Starts("another", 100)


def reported(run: RunDirectory, **findings: list[tuple[str, str]]) -> None:
    folder = run.path / "preflight"
    folder.mkdir(exist_ok=True)
    for host, failed in findings.items():
        found = [{"layer": layer, "what": what, "severity": "fail", "evidence": "no"} for layer, what in failed]
        (folder / f"{host}.json").write_text(json.dumps({"findings": found, "nodes": [{"node": host}]}))


TORCH, CARD = ("ML software", "torch"), ("infrastructure", "gpu_count")


def test_what_every_node_says_of_the_software_is_the_jobs(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "chain")
    assert software_failure(run) == ""
    reported(run, g1=[TORCH], g2=[TORCH, CARD])
    assert software_failure(run) == "torch: no"
    reported(run, g1=[TORCH], g2=[])
    assert software_failure(run) == "", "one of them is not like the other"
    reported(run, g1=[CARD], g2=[CARD])
    assert software_failure(run) == "", "two cards are missing"


def test_a_node_that_is_alone_is_borne_out_by_another_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one node goes elsewhere once; where the next node says the same it is the job's software."""
    run = RunDirectory.create(tmp_path, "chain")
    script = run.path / SCRIPT_FILE
    script.write_text("")
    os.utime(script, (1, 1))

    def check(host: str) -> str:
        (tmp_path / host).mkdir(exist_ok=True)
        found = {"layer": "ML software", "what": "torch", "severity": "fail", "evidence": "no"}
        report = tmp_path / host / "0.json"
        report.write_text(json.dumps({"findings": [found], "nodes": [{"node": host}]}))
        monkeypatch.setattr(checks, "doctor_command", lambda *told: ["cp", str(report), str(run.path / "preflight")])
        assert checks.failed_hosts(SlurmStep(run.path, "python"), [host], run) == {host: "torch: no"}
        return software_failure(run)

    assert check("g1") == ""
    assert check("g1") == "", "itself again"
    assert check("g2") == "torch: no"
    os.utime(script, (time.time() + 60, time.time() + 60))
    assert check("g3") == "", "it was handed in again since, perhaps mended"


def test_a_job_whose_software_is_unfit_ends_and_no_node_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path, "chain")
    for name, text in draft_run(chain_job("chain", 1), run.path).files().items():
        (run.path / name).write_text(text)
    reported(run, g1=[TORCH], g2=[TORCH])
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(batch, "ask", lambda *words: asked.append(words))
    monkeypatch.setattr(batch, "read_nodes", lambda hosts: [])
    monkeypatch.setattr(batch, "read_switches", list)
    monkeypatch.setattr(batch.signal, "signal", lambda *told: None)
    monkeypatch.setattr(batch.SlurmBatch, "_unfit", lambda *told: {"g1": "torch: no"})
    code = batch.SlurmBatch(run, NONCE, {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": "g1"}).run()
    assert code == 1
    assert "software on every node: torch: no; fix it" in run.marker_text("FATAL"), last_words(run)
    assert asked == [], "neither requeued nor excluded"
