"""`craton ps` is quick: it loads little, and adds up the books of a run that has ended once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from craton.cli.ps import _waiting_lines
from craton.cli.views.run_table import run_cells, run_table
from craton.orchestration import Standing
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.watching import Follower, glance, summary_cache
from craton.orchestration.watching import watch as watching
from craton.orchestration.watching.watch import WAITING_LOOK_SECONDS, next_pause
from craton.telemetry import RunDirectory, summarize
from craton.telemetry.node import Heartbeat, write_heartbeat

SAMPLES = Path(__file__).with_name("slurm_samples")
# What planning a job takes, and reading one. (Typer itself loads pydantic to read a command line.)
HEAVY = {"numpy", "torch", "yaml", "craton.job", "craton.planning", "craton.ml", "craton.orchestration.draft.draft"}


def make_run(root: Path, name: str, steps: int = 3) -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.launch_path.write_text(json.dumps({"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1}))
    add_steps(run, range(1, steps + 1))
    return run


def add_steps(run: RunDirectory, steps: range) -> None:
    for step in steps:
        told = {"time": 1e9 + step, "step": step, "generation": 0, "node": "node-0", "rank": 0}
        with run.metrics_path("node-0").open("a") as metrics, run.ledger_path("node-0").open("a") as ledger:
            metrics.write(json.dumps({**told, "run_loss": 1.0 / step, "run_step_seconds": 1.0}) + "\n")
            ledger.write(json.dumps({**told, "seconds": {"productive": 1.0}}) + "\n")


def recorded_slurm(folder: Path) -> None:
    """Slurm's tools, which answer with what was recorded of a real one."""
    folder.mkdir()
    (folder / "squeue").write_text(f"#!/bin/sh\nexec cat {SAMPLES}/squeue-22.05.json\n")
    (folder / "scontrol").write_text(f"#!/bin/sh\nexec cat {SAMPLES}/scontrol-$2-22.05.txt\n")
    for tool in folder.iterdir():
        tool.chmod(0o755)


def test_ps_loads_nothing_that_only_planning_needs(root: Path, tmp_path: Path) -> None:
    make_run(root, "ended").mark("DONE")
    write_heartbeat(make_run(root, "moves"), "node-0", Heartbeat(0, "running", os.getpid(), metrics_port=0))
    write_submission(make_run(root, "waits", 0), Submission("slurm", "3"))
    recorded_slurm(tmp_path / "tools")
    code = (
        "import sys; from craton.cli import main\n"
        "sys.argv = ['craton', 'ps']\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "CRATON_RUNS": str(root), "PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    rows = [line.split()[:2] for line in said.stdout.splitlines() if line.startswith(("ended ", "moves "))]
    assert sorted(rows) == [["ended", "done"], ["moves", "running"]]
    assert "waits: waits: needs" in said.stdout, "asked of Slurm, and said why"
    assert HEAVY & set(said.stderr.split()) == set()


def test_runs_that_wait_for_the_same_share_a_line(root: Path) -> None:
    first = summarize(make_run(root, "many-1"))
    waiting = [replace(first, name=f"many-{each}", state="waiting", message="2 of 8 free") for each in range(1, 501)]
    other = replace(first, name="other", state="waiting", message="held")
    lines = ["many-1 and 499 more: wait: 2 of 8 free", "other: waits: held"]
    assert _waiting_lines([replace(first, state="done"), *waiting, other]) == lines


def test_a_run_that_is_not_whole_says_why(root: Path) -> None:
    part = replace(summarize(make_run(root, "part")), state="starting", message="3 of 4 pods cannot be scheduled")
    assert _waiting_lines([part, replace(part, name="fresh", message="")]) == [
        "part: waits: 3 of 4 pods cannot be scheduled"
    ]


@pytest.mark.parametrize("package", ["craton.orchestration", "craton.agent", "craton.infrastructure"])
def test_every_name_of_a_package_is_where_its_table_says(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=rf"{package}' has no attribute 'nonsense'; it has "):
        module.nonsense  # noqa: B018


def test_a_run_that_has_ended_is_added_up_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "ended")
    run.mark("FATAL", "rank 0 ran out of luck")
    first = glance(run)
    assert (first.summary.state, first.summary.step, first.summary.wall_seconds) == ("failed", 3, 3.0)
    with monkeypatch.context() as patched:
        patched.setattr(summary_cache, "summarize", lambda _: pytest.fail("its files are read again"))
        assert glance(run) == first
        moved = RunDirectory(run.path.rename(root / "moved"))
        assert (glance(moved).summary.name, glance(moved).summary.path) == ("moved", moved.path)
    run = RunDirectory(moved.path.rename(run.path))
    add_steps(run, range(4, 6))
    assert glance(run).summary == summarize(run), "it went on"
    assert glance(run).summary.step == 5
    run.unmark("FATAL")
    run.mark("DONE")
    assert glance(run).summary.state == "done"
    run.unmark("DONE")
    assert glance(run).summary.state not in ("done", "failed")


def test_what_was_kept_and_cannot_be_used_is_made_again(root: Path) -> None:
    run = make_run(root, "ended")
    run.mark("DONE")
    first, kept = glance(run), run.path / "summary.json"
    for text in ("", "[]", json.dumps({**json.loads(kept.read_text()), "summary": {"step": 9}})):
        kept.write_text(text)
        assert glance(run) == first
    moving = make_run(root, "moves")
    write_heartbeat(moving, "node-0", Heartbeat(0, "running", os.getpid(), metrics_port=0))
    assert glance(moving).summary.state == "running"
    assert not (moving.path / "summary.json").exists(), "how it does now is not for later"


def test_the_table_of_a_narrow_terminal_keeps_names_whole(root: Path) -> None:
    run = make_run(root, "a-name-that-is-much-longer-than-its-column-may-be")
    run.mark("DONE")
    for width in (200, 80):
        titles, _, *lines = [line.plain for line in run_table([run_cells(glance(run).summary)], width)]
        words = ["RUN", "STATE", "GEN", "STEP", "%", "ETA", "LOSS", "TOK/S", "vs", "PLAN", "GOODPUT", "$"]
        assert titles.split() == words
        assert max(map(len, lines)) < width
        assert lines[0].split()[1:4] == ["done", "0", "3"]
        assert "".join(line.split()[0] for line in lines) == run.name
        begin = titles.index("GEN")
        assert lines[0][begin : begin + 3] == "  0", "numbers to the right, below their title"


def test_a_run_that_waits_is_asked_about_more_and_more_seldom() -> None:
    assert [next_pause(pause, Standing("waiting")) for pause in (2.0, 4.0, 8.0)] == [4.0, 8.0, 16.0]
    assert next_pause(16.0, Standing("waiting")) == next_pause(20.0, Standing("waiting")) == WAITING_LOOK_SECONDS
    assert next_pause(20.0, Standing("running")) == 2.0


def test_the_view_asks_at_once_when_the_files_tell_that_it_begins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "waits", 0)
    write_submission(run, Submission("slurm", "3"))
    clock, asked = [0.0], []
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watching, "standing_of", lambda _: asked.append(clock[0]) or Standing("waiting", "3"))
    follower = Follower(run)

    def look_for(seconds: int) -> None:
        for _ in range(2 * seconds):
            assert follower.look().summary.state == "waiting"
            clock[0] += 0.5

    look_for(120)
    assert asked == [0.0, 4.0, 12.0, 28.0, 48.0, 68.0, 88.0, 108.0]
    run.events_path("slurm").write_text(json.dumps({"time": time.time(), "event": "allocated", "node": "slurm"}) + "\n")
    look_for(4)
    assert asked[8:] == [120.0]
