"""How often state is kept in memory: as often as costs less than 2% of the time, measured on the first snapshots.

Training is blocked while the state is copied, and by a commit that takes longer than the steps until the next one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median

import torch

COST_SHARE = 0.02
MEASURED_SNAPSHOTS = 3


@dataclass(frozen=True)
class SnapshotCost:
    """Cost of one snapshot, in seconds."""

    copy: float  # training is blocked
    commit: float  # in the background
    step: float  # of training, without either

    @property
    def smallest_interval(self) -> int:
        """Minimum interval in steps that costs no more than COST_SHARE."""
        copies = math.ceil(self.copy / (COST_SHARE * self.step))
        commits = math.ceil((self.copy + self.commit) / ((1 + COST_SHARE) * self.step))
        return max(1, copies, commits)

    def steps_in(self, seconds: float) -> int:
        return max(1, round(seconds / self.step))

    def blocked_seconds(self, interval: int) -> float:
        return self.copy + max(0.0, self.commit - interval * self.step)

    def share(self, interval: int) -> float:
        return self.blocked_seconds(interval) / (interval * self.step)


@dataclass
class Costs:
    """Measurements on this rank, with a snapshot every step."""

    copies: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    device_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    step_began: float = 0.0
    _blocked: float = 0.0  # of the current step

    @property
    def snapshots(self) -> int:
        return len(self.copies)

    def step_ended(self) -> None:
        now = time.perf_counter()
        if self.step_began:
            self.steps.append(now - self.step_began - self._blocked)
        self.step_began, self._blocked = now, 0.0

    def snapshot_taken(self, began: float, settled: float) -> None:
        """The copy began when the previous snapshot was settled."""
        now = time.perf_counter()
        self.copies.append(now - settled)
        self._blocked += now - began

    def measured(self) -> tuple[float, float, float]:
        """copy, commit and step: medians; the first excludes one-time setup."""
        waits = [_elapsed(before, after) for before, after in self.device_waits]
        return median(self.copies) + max(waits, default=0.0), median(self.commits), median(self.steps)


def _elapsed(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000
