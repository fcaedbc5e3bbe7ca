"""Scripts that know nothing of Craton, on 2 nodes × 2 processes: killed, they go on from what they saved themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from counting import start, wait_for_state
from foreign_scripts import SAVED_EVERY, STEPS, beginnings, example, losses, processes
from waiting import wait_until

from craton.orchestration.start import stop_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize


def shown_by_ps(root: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "craton", "ps", "--json"]
    output = subprocess.run(
        command, env={**os.environ, "CRATON_RUNS": str(root)}, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, Any] = json.loads(output)[0]
    return found


def check_recovered(run: RunDirectory, victim: psutil.Process) -> None:
    """Kill it, and see the run go on from what the script has saved."""
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: len(beginnings(run)) == 2)
    began = beginnings(run)[1]
    assert began % SAVED_EVERY == 0
    assert began > 0
    wait_until(lambda: summarize(run).generation == 1 and summarize(run).step > began)
    wait_until(lambda: summarize(run).step_seconds, "steps of the new generation are timed")


def check_shown(root: Path) -> None:
    """`ps` tells how far it is, and what it came back from."""
    shown = shown_by_ps(root)
    assert shown["steps"] == STEPS
    assert shown["step"] > beginnings(RunDirectory(root / shown["name"]))[1]
    assert shown["step_seconds"] > 0
    assert shown["recoveries"]


@pytest.mark.slow
def test_a_script_of_plain_accelerate_under_torchrun(root: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    run = start(root, example("command-accelerate"))
    wait_until(lambda: summarize(run).step >= SAVED_EVERY + 2)
    assert run.log_path(0).read_text().count("4 processes resume after step 0") == 1
    (launcher,) = processes(run, "node-1")
    workers = launcher.children()
    assert len(workers) == 2
    check_recovered(run, workers[0])
    check_shown(root)
    assert wait_for_state(run, "done", "failed", "lost").state == "done"
    assert not any(worker.is_running() for worker in workers)
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(each) == 1 for each in found.values()), "a step that is done again has the same loss"


@pytest.mark.slow
def test_a_script_of_plain_jax(root: Path) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    run = start(root, example("command-jax"))
    wait_until(lambda: summarize(run).step >= SAVED_EVERY + 2)
    assert "4 processes with 4 devices resume after step 0" in run.log_path(0).read_text()
    check_recovered(run, processes(run, "node-1")[-1])
    stop_run(run)
    check_shown(root)
    assert wait_for_state(run, "stopped", "done", "failed", "lost").state == "stopped"
    wait_for_agents(run)
    resume_run(run, draft_resume(run, resumed_job(run)))
    summary = wait_for_state(run, "done", "failed", "lost")
    assert (summary.state, summary.step, summary.generation) == ("done", STEPS, 2)
    assert len(beginnings(run)) == 3
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(each) == 1 for each in found.values()), "a step that is done again has the same loss"
