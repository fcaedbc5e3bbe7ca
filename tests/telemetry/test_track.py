"""Trackers get what rank 0 and the agent recorded, once, over generations."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from craton.telemetry import RunDirectory
from craton.telemetry.errors import SinkError
from craton.telemetry.rank import Recorder
from craton.telemetry.sinks import SINKS
from craton.telemetry.track import follow


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "a")
    run.plan_path.write_text(json.dumps({"step_seconds": 2.0}))
    Recorder("n", 1, 1, run=run).metrics(1, run_loss=99.0)  # another rank
    return run


def record(run: RunDirectory, step: int, loss: float) -> None:
    Recorder("n", 0, 1, run=run).metrics(step, run_loss=loss, run_recording_share=0.0)


def looks(count: int) -> Callable[[float], bool]:
    """A `wait` that lets a follower look so many times."""
    left = iter(range(count - 1, -1, -1))
    return lambda seconds: next(left) == 0


def test_tensorboard_reads_back_what_was_recorded(run: RunDirectory) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record(run, 1, 3.0)
    record(run, 2, math.nan)
    follow(run, "tensorboard", looks(2))
    record(run, 3, 1.0)
    follow(run, "tensorboard", looks(1))  # the next generation goes on where the first ended
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((run.path / "tensorboard").iterdir()):
        events = accumulator.EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    assert found["plan_step_seconds"] == [(0, 2.0)]
    assert [step for step, _ in found["run_loss"]] == [1, 2, 3]
    assert math.isnan(found["run_loss"][1][1])
    assert found["run_loss"][2] == (3, 1.0)


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is an optional package and is not installed here")
def test_wandb_offline_keeps_the_run_here(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    record(run, 1, 3.0)
    follow(run, "wandb", looks(1))
    record(run, 2, 2.0)
    follow(run, "wandb", looks(1))
    identity = json.loads((run.path / "track" / "wandb.json").read_text())["id"]
    assert len(list((run.path / "track" / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))) >= 1


@pytest.mark.skipif(
    not (find_spec("mlflow") and find_spec("sqlalchemy")), reason="mlflow is an optional package, not installed here"
)
def test_mlflow_keeps_one_run_over_generations(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record(run, 1, 3.0)
    follow(run, "mlflow", looks(1))
    record(run, 2, 2.0)
    follow(run, "mlflow", looks(1))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path}/track/mlflow.db")
    identity = json.loads((run.path / "track" / "mlflow.json").read_text())["id"]
    assert [(each.step, each.value) for each in client.get_metric_history(identity, "run_loss")] == [(1, 3.0), (2, 2.0)]
    assert client.get_run(identity).data.params == {"plan_step_seconds": "2.0"}


def test_a_missing_package_names_the_command(run: RunDirectory) -> None:
    code = (
        "import sys\n"
        "sys.modules['wandb'] = None\n"  # what an import finds when the package is not installed
        "from craton.telemetry.track import main\n"
        f"sys.exit(main([{str(run.path)!r}, 'wandb']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install wandb, or remove it" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_tracker_names_the_known_ones(run: RunDirectory) -> None:
    with pytest.raises(SinkError, match=", ".join(SINKS)):
        follow(run, "smoke-signals", looks(1))
