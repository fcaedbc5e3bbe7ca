"""Which ranks are on this node, and how little of a shared file system is opened to know it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from observability.exporter.run_files import status_of

from craton.observability.exporter import runs_here
from craton.observability.exporter.runs_here import LOOK_SECONDS, RankHere, RunsHere
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat

_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    # Not folders on the way to a file, which are opened one by one, nor descriptors that become files.
    is_file = event == "open" and isinstance(arguments[0], str) and not os.O_DIRECTORY & arguments[2]  # type: ignore[operator]
    if _opened is not None and is_file:
        _opened.append(str(arguments[0]))


sys.addaudithook(_audit)  # the interpreter tells of every file and folder that is opened; a hook cannot be taken back


@contextmanager
def opens() -> Iterator[list[str]]:
    global _opened
    _opened = found = []
    try:
        yield found
    finally:
        _opened = None


def age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def finish(run: RunDirectory) -> None:
    """A run that nobody has written to for a day."""
    for folder in (run.path / "heartbeat", run.path / "status"):
        for each in (*folder.iterdir(), folder):
            age(each, 86_400)


def test_a_look_opens_the_files_of_this_host_s_runs_alone(tmp_path: Path) -> None:
    for number in range(30):
        over = RunDirectory.create(tmp_path, f"over-{number}")
        status_of(over, "node-0", {0: 1000 + number}, host="here")
        finish(over)
    large = RunDirectory.create(tmp_path, "large")
    for number in range(40):
        status_of(large, f"node-{number}", {number: 50 + number}, host="here" if number == 7 else f"host-{number}")
    here = RunsHere(tmp_path, "here")
    with opens() as first:
        assert here.look(0.0).by_number == {57: RankHere("large", "7", "node-7")}
    assert not [path for path in first if "over-" in path], "runs that are over are not opened"
    assert len(first) == 40 + 2, "each heartbeat once, and the two files of ours"
    with opens() as later:
        assert here.look(LOOK_SECONDS).by_number == {57: RankHere("large", "7", "node-7")}
    assert [Path(path).name for path in later] == ["node-7", "node-7.json"]
    with opens() as between:
        here.look(LOOK_SECONDS + 1)
    assert between == []


def test_a_node_that_moves_to_another_host_is_noticed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "moving")
    status_of(run, "node-0", {0: 10}, host="here")
    status_of(run, "node-1", {1: 11}, host="there")
    here, there = (RunsHere(tmp_path, host) for host in ("here", "there"))
    assert (set(here.look(0.0).by_number), set(there.look(0.0).by_number)) == ({10}, {11})
    status_of(run, "node-0", {0: 12}, host="there")
    age(run.path / "heartbeat", -1)  # the clock of a folder may tick slower than this test runs
    with opens() as opened:
        assert set(there.look(LOOK_SECONDS).by_number) == {11, 12}
    assert set(here.look(LOOK_SECONDS).by_number) == set()
    assert sum(Path(path).name == "node-1" for path in opened) == 1, "only what was replaced is read again"


def test_old_status_files_and_finished_runs_are_nobodys(tmp_path: Path) -> None:
    old, silent, done = (RunDirectory.create(tmp_path, name) for name in ("old", "silent", "done"))
    for number, run in enumerate((old, silent, done)):
        status_of(run, "node-0", {0: 4001 + number}, host="here")
    assert len(RunsHere(tmp_path, "here").look(0.0).ranks) == 3
    age(old.status_path("node-0"), 2 * runs_here.FRESH_SECONDS)
    age(silent.heartbeat_path("node-0"), 2 * runs_here.FRESH_SECONDS)
    write_heartbeat(done, "node-0", Heartbeat(0, "done", 1, 0, host="here"))
    assert RunsHere(tmp_path, "here").look(0.0).by_number == {}


def test_a_run_that_goes_on_after_a_rest_is_found_at_once_when_a_process_tells(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "rested")
    status_of(run, "node-0", {0: 10}, host="here")
    finish(run)
    here = RunsHere(tmp_path, "here")
    assert here.look(0.0).by_number == {}
    status_of(run, "node-0", {0: 20}, host="here")
    assert here.look(LOOK_SECONDS).by_number == {}, "an old run is asked for its age rarely"
    here.also(run.path, LOOK_SECONDS)
    assert set(here.look(LOOK_SECONDS).by_number) == {20}


def test_a_run_that_rests_is_found_again_within_ten_minutes_of_itself(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "rested")
    status_of(run, "node-0", {0: 10}, host="here")
    finish(run)
    here = RunsHere(tmp_path, "here")
    here.look(0.0)
    status_of(run, "node-0", {0: 20}, host="here")
    assert set(here.look(runs_here.LONGEST_REST_SECONDS).by_number) == {20}


def test_runs_that_processes_told_of_are_forgotten_once_they_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "elsewhere", "told")
    status_of(run, "node-0", {0: 10}, host="here")
    here = RunsHere(tmp_path / "runs", "here")
    here.also(run.path, 0.0)
    asked: list[Path] = []
    lives = RunsHere._lives
    monkeypatch.setattr(RunsHere, "_lives", lambda self, path, now: asked.append(path) or lives(self, path, now))
    assert set(here.look(1000.0).by_number) == {10}, "as long as it lives it need not be told again"
    finish(run)
    for now in (2000.0, 3000.0):
        assert here.look(now).by_number == {}
    assert asked == [run.path, run.path]
