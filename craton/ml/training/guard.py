"""Handling of bad steps: a non-finite gradient, a loss spike, out of memory.

A non-finite gradient or loss never reaches the weights: the optimizer skips such a step on the device. What follows is
the job's policy: continue (`skip`), return to the last checkpoint and skip the bad samples (`rollback`), or end with
the weights safe (`stop`). All ranks judge the same numbers, so they agree without communication. When memory runs out,
one error gives the phase, the prediction, and what to change.
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

WINDOW_STEPS = 128  # of good losses, whose median is the reference for a spike
MIN_STEPS = 8  # before there is a reference
MAX_IN_A_ROW = 100  # skipped steps, after which the weights themselves must be broken
MAX_ROLLBACKS = 3  # to the same checkpoint


class TrainingStoppedError(CratonError):
    """The job's policy ended the training."""


class OutOfMemoryError(CratonError):
    """The layout needs more memory than a rank has."""


@dataclass(frozen=True)
class BadStep:
    """A bad step, and the job's policy for it."""

    step: int
    reason: str
    policy: FaultPolicy
    counted: bool  # whether the optimizer took the step
    is_finite: bool = True  # False: the loss or the gradient is NaN or Inf


class StepGuard:
    """Judges steps in order, once the numbers of each have arrived."""

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
        """The device skips a step whose loss is not below this."""
        return self._limit if self._spike is not None and self._spike.policy == "skip" else math.inf

    def judge(self, step: int, loss: float, norm: float, below_limit: bool) -> BadStep | None:
        """Return the fault of a step, None for a good one. `below_limit`: the device's result for `highest_loss`."""
        if not math.isfinite(loss) or (self._clips and not math.isfinite(norm)):
            reason = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
            return self._count(BadStep(step, reason, self._on_nan, counted=False, is_finite=False))
        if self._spike is not None and (not below_limit or loss > self._limit):
            level = median(self._losses)
            reason = f"the loss is {loss:.4g}, over {self._spike.factor:g} times its recent level of {level:.4g}"
            return self._count(BadStep(step, reason, self._spike.policy, below_limit))
        self._losses.append(loss)
        self._in_a_row = 0
        return None

    def rolled_back(self, step: int, fault: BadStep) -> None:
        """Record that the checkpoint of `step` was restored for this fault; raise if this would repeat forever."""
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        if self._rollbacks[step] > MAX_ROLLBACKS:
            raise TrainingStoppedError(
                f"step {fault.step}: {fault.reason}, and this is rollback {self._rollbacks[step]} to the checkpoint "
                f"of step {step}; lower train.learning_rate or check the data, then run `craton resume`"
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
                f"step {fault.step}: {fault.reason}, after {MAX_IN_A_ROW} bad steps in a row; the weights are as "
                "before them. Lower train.learning_rate, or start from an older checkpoint"
            )
        return fault


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory. CUDA has its own error class; the CPU allocator raises a RuntimeError that
    only its text identifies."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def describe_out_of_memory(
    phase: str, ranks: Ranks, train: Train, prediction: PlannedStep | None, has_graphs: bool = False
) -> OutOfMemoryError:
    """Return one error that says where it happened and what to change, the cheapest change first. `has_graphs`: CUDA
    graphs hold memory that nothing else can use."""
    layout = ranks.layout
    changes = ["train.graphs off"] if has_graphs else []
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
        text += f"; predicted: {memory(prediction.memory_bytes)} of {memory(prediction.memory_limit_bytes)}"
    return OutOfMemoryError(f"{text}. Change one of: {'; '.join(changes)}")
