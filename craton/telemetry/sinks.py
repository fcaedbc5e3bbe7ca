"""Trackers that receive a run's metrics: TensorBoard, Weights & Biases, MLflow. Each package is imported on demand.

A sink takes scalars by step under their names in the vocabulary, and the predictions (`plan_X`) once. `state` is a
small dict that survives from one generation to the next, so that a resumed run continues in the same tracker run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from craton.extras import install_package_command
from craton.telemetry.errors import SinkError
from craton.telemetry.rundirectory import RunDirectory

State = dict[str, Any]
MLFLOW_BATCH = 1000  # maximum metrics per request of MLflow's REST API


class Sink(Protocol):
    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        """Log the scalars of one step, measured at `moment` (epoch seconds)."""

    def flush(self) -> None:
        """Make everything logged so far durable."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in RUN/tensorboard, one per generation; `tensorboard --logdir` shows them as one curve."""

    def __init__(self, run: RunDirectory, plan: Mapping[str, float], state: State) -> None:
        self._event = _load("tensorboard.compat.proto.event_pb2").Event
        self._summary = _load("tensorboard.compat.proto.summary_pb2").Summary
        files = _load("tensorboard.summary.writer.event_file_writer")
        self._writer = files.EventFileWriter(str(run.path / "tensorboard"))
        if not state.get("planned"):
            self.log(0, run.path.stat().st_mtime, plan)
            state["planned"] = True

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=moment, step=step, summary=self._summary(value=scalars)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run with the run's name, in $WANDB_PROJECT or "craton"; $WANDB_MODE=offline keeps it local."""

    def __init__(self, run: RunDirectory, plan: Mapping[str, float], state: State) -> None:
        wandb = _load("wandb")
        state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "craton"),
            name=run.name,
            id=state["id"],
            resume="allow",
            dir=str(run.path / "track"),
            config=dict(plan),
        )
        # W&B's own step counter only increases; a run that rolls back repeats some steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": moment, **values})

    def flush(self) -> None:
        """W&B's own process writes at once."""

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run with the run's name, in the experiment $MLFLOW_EXPERIMENT_NAME or "craton".

    Stored at $MLFLOW_TRACKING_URI, else in RUN/track/mlflow.db.
    """

    def __init__(self, run: RunDirectory, plan: Mapping[str, float], state: State) -> None:
        entities = _load("mlflow.entities")
        client = _load("mlflow.tracking").MlflowClient
        self._metric = entities.Metric
        self._client = client(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path}/track/mlflow.db")
        if "id" not in state:
            experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "craton")
            experiment = self._client.get_experiment_by_name(experiment_name)
            identity = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
            state["id"] = self._client.create_run(identity, run_name=run.name).info.run_id
            self._client.log_batch(
                state["id"], params=[entities.Param(name, repr(value)) for name, value in plan.items()]
            )
        self._id = state["id"]
        self._pending: list[Any] = []
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        self._pending += [self._metric(name, value, int(moment * 1000), step) for name, value in values.items()]

    def flush(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:MLFLOW_BATCH])
            del self._pending[:MLFLOW_BATCH]

    def close(self) -> None:
        self._client.set_terminated(self._id)


SINKS: dict[str, Callable[[RunDirectory, Mapping[str, float], State], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


def _load(module: str) -> ModuleType:
    package = module.split(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise SinkError(
            f"`track: [{package}]` needs the package {package} ({error}); run: {install_package_command(package)}, or "
            "remove it from `track` in the job file"
        ) from error
