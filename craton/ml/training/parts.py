"""The components of a training, passed to the loop and to the code that saves its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from craton.errors import CratonError
from craton.job import Job
from craton.ml.data import Loader, Source
from craton.ml.training.checkpoint import Checkpointer
from craton.ml.training.measure import Meter
from craton.ml.training.objectives import Objective
from craton.ml.training.optimizer import AdamW, Schedule
from craton.ml.training.parallel import Ranks
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder


class MissingWeightsError(CratonError):
    """The weights that a job starts from cannot be read."""


@dataclass
class Parts:
    """The components of a training."""

    job: Job
    ranks: Ranks
    model: nn.Module
    optimizer: AdamW
    objective: Objective
    schedule: Schedule
    open_loader: Callable[[int], Loader]  # from a global sample index on
    validation: Source | None
    checkpointer: Checkpointer
    recorder: Recorder
    clock: LedgerClock
    meter: Meter
    shares_gpu: bool = False  # with other ranks
    directory: RunDirectory | None = None  # has the metrics of earlier generations
    missing_weights: str = ""  # why the model does not have the weights it starts from; a checkpoint has them
