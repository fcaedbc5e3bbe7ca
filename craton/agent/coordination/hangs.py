"""Hang detection: pure functions that decide from the agents' reports whether a rank hangs, and which one.

Ranks of a training run wait for each other in every step, so one that hangs stops all of them, and a slow one delays
all of them. Hence:

- A step hangs after HANG_STEPS times the slowest recent step, but not before HANG_SECONDS. Other phases have their own
  limits.
- Seconds in which threads of any rank were runnable and got no CPU, and seconds in which an agent itself did not run,
  extend the limit of all ranks.
- A rank in a step is blamed only if no rank has moved for that long: while one of them moves, the others wait for it.
  The exception are jobs whose ranks do not wait for each other: a rank that falls two steps behind all others.
- A rank that waits for one in an earlier step, or for one that still loads data, is judged by the limit of that rank.
- A rank that a signal has stopped cannot move: it is judged alone, by its usual step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HANG_SECONDS, HANG_STEPS = 4.0, 2.5  # a step hangs if it takes longer than both
LIMITS = {  # maximum seconds without progress, by what a rank is doing
    "waiting": 600.0,
    "start": 900.0,
    "compile": 900.0,
    "data": 300.0,
    "checkpoint": 900.0,
    "evaluate": 900.0,
    "detect": 60.0,
    "regroup": 120.0,
    "restore": 900.0,
    "idle": 900.0,
}
STEPPING = ("productive", "redo")
MAX_DOUBLINGS = 4  # of a step's limit, one per failure without a new step


@dataclass(frozen=True)
class RankProgress:
    """What a rank was doing at its agent's last look."""

    kind: str
    step: int
    age: float  # seconds since it last showed progress
    step_seconds: float
    is_stopped: bool = False  # by a signal
    generation: int = -1  # the one it has entered
    patience: float = 0.0  # seconds without progress that the rank requests; 0: its phase decides
    slowest_seconds: float = 0.0  # the slowest recent step, including the last one; 0: unknown
    starved_seconds: float = 0.0  # since its last progress: no CPU for its threads, or its agent did not run

    @property
    def limit(self) -> float:
        """Seconds without progress after which it hangs, if the machine has CPU time for all its threads."""
        if self.is_stopped:
            return max(HANG_SECONDS, HANG_STEPS * self.step_seconds)
        if self.patience:
            return self.patience
        slowest = max(self.step_seconds, self.slowest_seconds)
        if self.is_stepping and slowest:
            return max(HANG_SECONDS, HANG_STEPS * slowest)
        return LIMITS.get(self.kind, LIMITS["start"])

    @property
    def is_stepping(self) -> bool:
        return self.kind in STEPPING


def find_hang(ranks: Sequence[RankProgress], failures: int = 0) -> int | None:
    """Return the index of the rank that hangs; None: none does. Each of the `failures` in a row without a new step
    doubles the limit of a step: a step that became slow permanently must not be killed again and again."""
    if not ranks:
        return None
    stopped = [index for index, rank in enumerate(ranks) if rank.is_stopped]
    oldest = max(stopped or range(len(ranks)), key=lambda index: ranks[index].age)
    suspect = ranks[oldest]
    if suspect.is_stopped:
        return oldest if suspect.age > suspect.limit else None
    others = [rank for index, rank in enumerate(ranks) if index != oldest]
    limit = max([suspect.limit, *(rank.limit for rank in others if _waits_for(suspect, rank))])
    if suspect.is_stepping and not suspect.patience:
        limit *= 2.0 ** min(failures, MAX_DOUBLINGS)
    limit += max(rank.starved_seconds for rank in ranks)
    return oldest if _still_seconds(suspect, others) > limit else None


def _waits_for(suspect: RankProgress, other: RankProgress) -> bool:
    """Whether the suspect is ahead of another rank, and so most likely waits for it."""
    if not suspect.is_stepping or suspect.patience or not other.step:
        return False
    return other.step < suspect.step or (other.step == suspect.step and other.kind == "data")


def _still_seconds(suspect: RankProgress, others: Sequence[RankProgress]) -> float:
    """Return how long the suspect has not moved without a reason to wait."""
    reporting = [rank for rank in others if rank.step]  # a job's own command may report no steps
    is_alone = all(rank.step >= suspect.step + 2 for rank in reporting)
    if suspect.patience or not suspect.is_stepping or is_alone:
        return suspect.age
    return min(suspect.age, *(rank.age for rank in reporting))
