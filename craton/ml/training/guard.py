"""What happens when a step is bad: a gradient that is not finite, a loss that jumps, memory that runs out.

A gradient or loss that is not finite never reaches the weights: the optimizer skips such a step on the device. What
else happens is the job's choice: go on (`skip`), return to the last checkpoint and leave the bad samples out
(`rollback`), or end with the weights safe (`stop`). All ranks judge the same numbers, so they agree without asking.
Where memory runs out, one error says in which phase, what was predicted, and what to change.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import torch

from craton.errors import CratonError
from craton.formatting import memory
from craton.job.sections import FaultPolicy, Train
from craton.ml.training.measure import PlannedStep, peak_memory_bytes
from craton.ml.training.parallel import Ranks

WINDOW_STEPS = 128  # of good losses, whose median is the level a spike is measured against
MIN_STEPS = 8  # before there is a level
MAX_IN_A_ROW = 100  # skipped steps, after which the weights themselves must be broken
MAX_ROLLBACKS = 3  # to the same checkpoint


class TrainingStoppedError(CratonError):
    """The job's own policy ended the training."""


class OutOfMemoryError(CratonError):
    """The layout needs more memory than a rank has."""


@dataclass(frozen=True)
class BadStep:
    """A bad step, and what the job wants done about it."""

    step: int
    reason: str
    policy: FaultPolicy
    counted: bool  # whether the optimizer took the step


class StepGuard:
    """Judges steps in order, each once its numbers have arrived."""

    def __init__(self, train: Train) -> None:
        self._on_nan: FaultPolicy = train.on_nan
        self._spike = train.on_spike
        self._clips = train.clip > 0
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._in_a_row = 0
        self._rollbacks: dict[int, int] = {}
        self.skipped_steps = 0

    @property
    def highest_loss(self) -> float:
        """A step whose loss is not below this is skipped on the device."""
        return self._limit if self._spike is not None and self._spike.policy == "skip" else math.inf

    def judge(self, step: int, loss: float, norm: float, below_limit: bool) -> BadStep | None:
        """The fault of a step, None for a good one. `below_limit`: what the device found of `highest_loss`."""
        if not math.isfinite(loss) or (self._clips and not math.isfinite(norm)):
            reason = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
            return self._count(BadStep(step, reason, self._on_nan, counted=False))
        if self._spike is not None and (not below_limit or loss > self._limit):
            level = median(self._losses)
            reason = f"the loss is {loss:.4g}, over {self._spike.factor:g} times its recent level of {level:.4g}"
            return self._count(BadStep(step, reason, self._spike.policy, below_limit))
        self._losses.append(loss)
        self._in_a_row = 0
        return None

    def rolled_back(self, step: int, fault: BadStep) -> None:
        """Says that the checkpoint of `step` was taken for this fault; ends what would go on for ever."""
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        if self._rollbacks[step] > MAX_ROLLBACKS:
            raise TrainingStoppedError(
                f"step {fault.step}: {fault.reason}, and this is the {self._rollbacks[step]}. return to the checkpoint "
                f"of step {step}; lower train.learning_rate or look at the data, then `craton resume`"
            )

    @property
    def _limit(self) -> float:
        if self._spike is None or len(self._losses) < MIN_STEPS:
            return math.inf
        return self._spike.factor * median(self._losses)

    def _count(self, fault: BadStep) -> BadStep:
        if not fault.counted:
            self.skipped_steps += 1
            self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            raise TrainingStoppedError(
                f"step {fault.step}: {fault.reason}, and so it was for {MAX_IN_A_ROW} steps before; the weights are as "
                "they were then. Lower train.learning_rate, or start from an older checkpoint"
            )
        return fault


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an error of its own; the CPU's allocator raises a RuntimeError that only its text tells apart."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def describe_out_of_memory(phase: str, ranks: Ranks, train: Train, prediction: PlannedStep | None) -> OutOfMemoryError:
    """One error that says where it happened and how to make it fit, the cheapest change first."""
    layout = ranks.layout
    changes = []
    if phase in ("forward", "backward", "evaluation"):
        if layout.micro_batch > 1:
            changes.append(f"layout.micro_batch below {layout.micro_batch}")
        if layout.recompute != "full":
            changes.append(f"layout.recompute {'selective or full' if layout.recompute == 'none' else 'full'}")
    changes.append(f"layout.fsdp above {layout.fsdp} (more ranks)")
    if train.weights == "fp32" and layout.precision != "fp32":
        changes.append("train.weights bf16")
    if layout.micro_batch == 1 and phase in ("forward", "backward", "evaluation"):
        changes.append("a shorter data.sequence")
    used = peak_memory_bytes(ranks.device)
    text = f"rank {ranks.rank} ran out of memory in the {phase} phase after using {memory(used)} with {layout}"
    if prediction is not None:
        text += f"; predicted were {memory(prediction.memory_bytes)} of {memory(prediction.memory_limit_bytes)}"
    return OutOfMemoryError(f"{text}. Change one of: {'; '.join(changes)}")
