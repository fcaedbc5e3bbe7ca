"""Runs on the Slurm of this machine, and what became of them."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import chain
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.job import Job, parse_job
from craton.orchestration import Standing
from craton.orchestration.draft import draft_run
from craton.orchestration.start import start_run
from craton.orchestration.watching import settled, standing_of
from craton.telemetry import RunDirectory, RunSummary, summarize
from craton.telemetry.files import read_lines

CHAIN = Path(chain.__file__)
SLURM_SECONDS = 2 * PATIENCE_SECONDS  # jobs wait for each other, and sixteen processes may import torch on two cores


def chain_job(
    name: str,
    nodes: int | str = 2,
    steps: int = 20,
    step_seconds: float = 0.05,
    run: str = "",
    more: str = "",
) -> Job:
    """A job of ranks whose losses are a chain, for Slurm."""
    options = f", {run}" if run else ""
    return parse_job(
        f"name: {name}\nkind: command\ncommand: [{sys.executable}, {CHAIN}]\ncluster: local x {nodes}\n"
        f"run: {{on: slurm{options}, env: {{STEPS: '{steps}', STEP_SECONDS: '{step_seconds}'}}}}\n{more}",
        folder=no_code(),
    )


@cache
def no_code() -> Path:
    """An empty folder, for the code beside a job is kept with every run of it."""
    folder = tempfile.mkdtemp(prefix="no-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def submit(root: Path, job: Job) -> RunDirectory:
    return start_run(draft_run(job, root / job.name, port=free_port()), root)


def look(run: RunDirectory) -> RunSummary:
    return settled(summarize(run), standing_of(run))


def wait_for_run(run: RunDirectory, *states: str) -> RunSummary:
    def is_there() -> RunSummary | None:
        summary = look(run)
        assert summary.state in states or summary.state not in ("failed", "lost"), f"{summary}{last_words(run)}"
        return summary if summary.state in states else None

    found = wait_until(is_there, lambda: f"{look(run)}{last_words(run)}", SLURM_SECONDS, look_seconds=0.2)
    assert found is not None
    return found


def wait_for_step(run: RunDirectory, step: int) -> None:
    wait(lambda: summarize(run).step >= step, f"{run.name} is at step {step}", run)


def wait(condition: Callable[[], object], what: str, run: RunDirectory) -> None:
    wait_until(condition, lambda: f"{what}{last_words(run)}", SLURM_SECONDS, look_seconds=0.1)


def losses_of(run: RunDirectory) -> dict[int, float]:
    """Step → loss, the last time it was done."""
    lines = [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]
    lines.sort(key=lambda line: float(line["time"]))
    return {line["step"]: line["run_loss"] for line in lines if "run_loss" in line}


def events_of(run: RunDirectory, name: str) -> list[dict[str, object]]:
    lines = [line for path in (run.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
    return [line for line in lines if line.get("event") == name]


def hosts_of(run: RunDirectory) -> dict[str, str]:
    """Node → host of the newest allocation."""
    document = json.loads((run.path / "allocation.json").read_text())
    return {node["name"]: node["host"] for node in document["nodes"]}


def standing(run: RunDirectory) -> Standing:
    return standing_of(run)


def expect_whole_chain(run: RunDirectory, steps: int) -> None:
    """Every step has the loss of a run that nothing happened to."""
    found, expected = losses_of(run), chain.losses(steps)
    assert found[steps] == expected[steps], last_words(run)
    assert {step: loss for step, loss in found.items() if loss != expected[step]} == {}, last_words(run)


def last_words(run: RunDirectory) -> str:
    """What the batch script, the agents and the ranks said last."""
    words = [f"\n{path.name}: {line}" for path in sorted((run.path / "logs").glob("*")) for line in _tail(path)]
    return "".join(words)


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-8:]
