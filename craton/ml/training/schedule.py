"""The learning rate of a step, a pure function of the step's number, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from craton.errors import CratonError
from craton.job import Job
from craton.job.sections import LearningRateSchedule

DECAY_SHARE = 0.2  # of all steps, at the end of warmup-stable-decay (arXiv:2404.06395 finds 10% enough, 20% safe)


class ScheduleError(CratonError):
    """The job does not say how long it trains."""


@dataclass(frozen=True)
class Schedule:
    """Rises linearly to `peak` over the warm-up, then falls to `final` at the last step as `shape` says."""

    shape: LearningRateSchedule
    steps: int
    warmup_steps: int
    peak: float
    final: float

    @classmethod
    def of(cls, job: Job) -> Schedule:
        assert job.train is not None, f"kind {job.kind} does not train"
        if job.steps is None:
            raise ScheduleError(
                f"{job.where('train')}train says neither steps nor tokens; training needs an end: write train.steps"
            )
        return cls(job.train.schedule, job.steps, job.warmup_steps or 0, job.learning_rate, job.final_learning_rate)

    def learning_rate(self, step: int) -> float:
        """Of the step with this number; the first is 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "wsd":
            decay_steps = max(1, round(DECAY_SHARE * self.steps))
            return self._between(1 - max(0, step - (self.steps - decay_steps)) / decay_steps)
        left = 1 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.shape == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self._between(left)

    def _between(self, share: float) -> float:
        return self.final + (self.peak - self.final) * min(1.0, max(0.0, share))
