"""A run is a directory: making, finding and marking one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from craton.errors import CratonError
from craton.telemetry import RunDirectory, RunError, RunExistsError, RunNotFoundError, find_run, list_runs, runs_root


def test_everything_has_its_place(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "first")
    assert run.name == "first"
    named = {
        "job.yaml": run.job_path,
        "plan.json": run.plan_path,
        "launch.json": run.launch_path,
        "events/a.jsonl": run.events_path("a"),
        "metrics/a.jsonl": run.metrics_path("a"),
        "ledger/a.jsonl": run.ledger_path("a"),
        "heartbeat/a": run.heartbeat_path("a"),
        "logs/rank-00007.log": run.log_path(7),
        "checkpoints/shared": run.checkpoints("shared"),
    }
    assert {name: str(path.relative_to(run.path)) for name, path in named.items()} == {name: name for name in named}
    assert all(path.parent.is_dir() for path in named.values())


def test_of_many_that_want_a_name_one_gets_it(tmp_path: Path) -> None:
    def create(_: int) -> bool:
        try:
            RunDirectory.create(tmp_path, "wanted")
        except RunExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1
    with pytest.raises(RunExistsError, match="craton resume wanted"):
        RunDirectory.create(tmp_path, "wanted")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "with space"])
def test_names_that_are_not_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="change `name` in the job file"):
        RunDirectory.create(tmp_path, name)


def test_a_root_that_cannot_hold_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CratonError, match="file"):
        RunDirectory.create(tmp_path / "file", "a")


def test_markers(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    assert not run.has("FATAL")
    assert run.marker_text("FATAL") == ""
    run.mark("FATAL", "node a: rank 0")
    run.mark("FATAL", "node b: rank 9")
    assert run.has("FATAL")
    assert run.marker_text("FATAL") == "node a: rank 0\nnode b: rank 9\n"
    run.unmark("FATAL")
    run.unmark("FATAL")
    assert not run.has("FATAL")


def test_runs_are_listed_newest_first_and_found_by_name_or_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path))
    assert runs_root() == tmp_path
    assert list_runs(tmp_path / "nowhere") == []
    for age, name in enumerate(["old", "older"]):
        run = RunDirectory.create(tmp_path, name)
        run.job_path.touch()
        os.utime(run.job_path, (1e9 - age, 1e9 - age))
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").touch()
    assert [run.name for run in list_runs()] == ["old", "older"]
    assert find_run("older") == RunDirectory(tmp_path / "older")
    assert find_run(tmp_path / "old").name == "old"
    with pytest.raises(RunNotFoundError, match="did you mean 'older'"):
        find_run("oldre")
    with pytest.raises(RunNotFoundError, match="existing runs: old, older"):
        find_run("zzz")
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "nowhere"))
    with pytest.raises(RunNotFoundError, match="there are no runs in"):
        find_run("zzz")


def test_the_root_is_runs_beside_you_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRATON_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert runs_root() == tmp_path / "runs"
