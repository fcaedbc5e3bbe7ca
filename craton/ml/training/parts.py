"""The components of a training, passed to the loop and to the code that saves its state; and the recipe of a kind of
training: what is built otherwise than for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray
from torch import nn

from craton.errors import CratonError
from craton.job import Job
from craton.ml.training.checkpoint import Checkpointer
from craton.ml.training.measure import Meter
from craton.ml.training.objectives import Objective
from craton.ml.training.optimizer import AdamW, Schedule
from craton.ml.training.parallel import Pipeline, Ranks
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder


class MissingWeightsError(CratonError):
    """The weights that a job starts from cannot be read."""


class StepLoader(Protocol):
    """Gives the micro-batches of one step after another; every rank gets the same number of them."""

    check: Callable[[], None]  # set by the loop; raises when the generation is over, for waits that may be long
    pending: Sequence[int]  # samples before `state` that later steps train; set by the loop where training resumes

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Seconds of the last `next` that are not data loading, by phase."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of the last `next`, for the record of its step."""

    @property
    def state(self) -> int:
        """The first global sample of the next step; a loader that is opened there continues exactly."""

    @property
    def is_step_done(self) -> bool:
        """Whether the last `next` gave the micro-batches of the step's last optimizer update."""

    def next(self) -> Sequence[Mapping[str, NDArray]]:
        """Return the micro-batches of the next optimizer update on this rank; a step has one or more."""

    def close(self) -> None:
        """End what the loader has started."""


Evaluation = Callable[[Pipeline | None], dict[str, float]]  # called by all ranks, which get the same numbers


class AttachedSuite(Protocol):
    """Evaluates a suite between two steps. All ranks call its methods together, and get the same numbers."""

    def find(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation that is done; empty if there is none of this step."""

    def evaluate(self, step: int, check: Callable[[], None], is_leaving: Callable[[], bool]) -> dict[str, float]:
        """Return the metrics of the present weights; empty if any rank is leaving. `check` raises when the generation
        is over."""


@dataclass(frozen=True)
class TrainingSetup:
    """What a rank has before its data is opened. The model has the weights that training starts from, whatever a
    checkpoint of the run has: it is restored later."""

    job: Job
    directory: RunDirectory
    ranks: Ranks
    model: nn.Module
    objective: Objective
    vocabulary: int
    recorder: Recorder
    clock: LedgerClock
    missing_weights: str = ""  # why the model does not have the weights it starts from


@dataclass(frozen=True)
class TrainingInputs:
    """Where the batches of a training come from, and how it is evaluated."""

    open_loader: Callable[[int], StepLoader]  # from a global sample index on
    evaluate: Evaluation | None  # None: the job does not ask for it
    suite: AttachedSuite | None = None  # likewise


@dataclass(frozen=True)
class Recipe:
    """What differs by kind of training."""

    objective: Callable[[Job], Objective]
    open_inputs: Callable[[TrainingSetup], TrainingInputs]  # called by all ranks


@dataclass
class Parts:
    """The components of a training."""

    job: Job
    ranks: Ranks
    model: nn.Module
    optimizer: AdamW
    objective: Objective
    schedule: Schedule
    open_loader: Callable[[int], StepLoader]  # from a global sample index on
    evaluate: Evaluation | None
    checkpointer: Checkpointer
    recorder: Recorder
    clock: LedgerClock
    meter: Meter
    suite: AttachedSuite | None = None
    shares_gpu: bool = False  # with other ranks
    directory: RunDirectory | None = None  # has the metrics of earlier generations
    missing_weights: str = ""  # why the model does not have the weights it starts from; a checkpoint has them
