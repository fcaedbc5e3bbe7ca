"""`craton.run` and its handle, on ranks that count steps (tests/orchestration/rank.py) under real agents."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from orchestration.counting import counting_job
from waiting import PATIENCE_SECONDS, wait_until

import craton
from craton import CratonError, Run
from craton.job import dump_job
from craton.orchestration import RunStateError, living_agents
from craton.orchestration.watching import View
from craton.telemetry import RunDirectory, RunExistsError
from craton.telemetry.rank import Recorder

MANY_STEPS = 1_000_000


def test_a_run_from_its_start_to_its_end(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "count.yaml"
    path.write_text(dump_job(counting_job(STEPS=3)), encoding="utf-8")
    run = craton.run(path, "counted")
    summary = run.wait(PATIENCE_SECONDS)
    assert (summary.state, summary.step, summary.ranks) == ("done", 3, 2)
    assert (run.name, run.path, run.state) == ("counted", root / "counted", "done")
    assert repr(run) == f"Run({str(root / 'counted')!r}, done)"
    assert living_agents(run.directory) == [], "wait returns once nothing of it is left"
    assert list(run.logs(last=1)) == ["rank 0 leaves after step 3", "rank 1 leaves after step 3"]
    started, left = run.logs([1])
    assert started.startswith("rank 1 of 2 starts after step ")  # the other rank may have counted before
    assert left == "rank 1 leaves after step 3"
    verdict = run.why()
    assert (verdict.condition, verdict.cause) == ("done", "")
    assert verdict.sentence.startswith("counted is done")
    assert run.stop().state == "done", "a run that has ended stays as it is"
    with pytest.raises(RunExistsError, match="counted"):
        craton.run(path, "counted")


def test_a_run_is_stopped_and_resumed(root: Path) -> None:
    run = craton.run(counting_job(STEPS=MANY_STEPS))
    looks: list[View] = []
    with pytest.raises(TimeoutError, match=r"count is (starting|running) after 300 ms, at step"):
        run.wait(0.3, looks.append)
    assert looks
    assert all(view.is_moving for view in looks)
    wait_until(lambda: run.summary().step > 0, run)
    stopped = run.stop()
    assert stopped.state == "stopped"
    assert living_agents(run.directory) == []
    assert run.resume().path == run.path
    wait_until(lambda: run.summary().step > stopped.step, run)
    assert run.stop(now=True).state == "stopped"
    assert run.summary().generation == 1
    assert list(run.logs([0]))[1] == f"rank 0 leaves after step {stopped.step}", "the stop was one with a checkpoint"
    assert living_agents(run.directory) == []


def test_a_run_that_fails_says_why(root: Path) -> None:
    run = craton.run(counting_job(STEPS=MANY_STEPS, FAIL_RANK=1))
    assert run.wait(PATIENCE_SECONDS).state == "failed"
    verdict = run.why()
    assert verdict.condition == "dead"
    assert "the reward function broke" in verdict.sentence
    assert any("rank 1 on node-1 exited with code 1" in line for line in run.logs(agents=True))
    with pytest.raises(RunStateError, match="count"):
        run.resize(1)


def test_runs_are_listed_and_found_by_name(root: Path, tmp_path: Path) -> None:
    assert craton.runs() == []
    for name in ("one", "two"):
        RunDirectory.create(root, name)
    assert {run.name for run in craton.runs()} == {"one", "two"}
    assert craton.runs(tmp_path / "elsewhere") == []
    assert Run("two").path == Run(root / "two").path == root / "two"
    with pytest.raises(CratonError, match="three"):
        Run("three")


@pytest.fixture
def recorded(root: Path) -> Run:
    """A run whose second generation did step 2 again, and measured the accuracy of step 3 only."""
    directory = RunDirectory.create(root, "recorded")
    for generation, step, numbers in [
        (0, 1, {"run_loss": 4.0}),
        (0, 2, {"run_loss": 3.0}),
        (1, 2, {"run_loss": 2.5}),
        (1, 3, {"run_loss": 2.0, "run_accuracy": 0.5}),
    ]:
        Recorder("node-0", 0, generation, directory).metrics(step, **numbers)
    return Run(directory)


def test_metrics_without_pandas_are_arrays(recorded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    metrics = recorded.metrics()
    assert list(metrics)[:2] == ["step", "run_loss"]
    assert metrics["step"].tolist() == [1, 2, 3]
    assert metrics["run_loss"].tolist() == [4.0, 2.5, 2.0]
    np.testing.assert_array_equal(metrics["run_accuracy"], [np.nan, np.nan, 0.5])
    assert recorded.metrics(rank=1)["step"].tolist() == []


class DataFrame:
    """What the two classes of pandas that are used keep, for where pandas is not installed."""

    def __init__(self, columns: dict[str, Any], index: Index) -> None:
        self.columns, self.index = list(columns), index
        self.values = columns

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Index(list[int]):
    def __init__(self, values: list[int], name: str) -> None:
        super().__init__(values)
        self.name = name


@pytest.fixture
def pandas(monkeypatch: pytest.MonkeyPatch) -> Any:
    try:
        import pandas
    except ImportError:
        pandas = ModuleType("pandas")
        pandas.__spec__ = ModuleSpec("pandas", None)
        pandas.DataFrame, pandas.Index = DataFrame, Index  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pandas", pandas)
    return pandas


def test_metrics_with_pandas_are_a_data_frame(recorded: Run, pandas: Any) -> None:
    metrics = recorded.metrics()
    assert isinstance(metrics, pandas.DataFrame)
    assert (list(metrics.index), metrics.index.name) == ([1, 2, 3], "step")
    assert {"run_loss", "run_accuracy"} <= set(metrics.columns)
    assert list(metrics["run_loss"]) == [4.0, 2.5, 2.0]
