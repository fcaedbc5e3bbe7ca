"""Hang detection: pure functions that decide from the agents' reports whether a rank hangs, and which one.

Ranks of a training run wait for each other in every step, so one that hangs stops all of them, and a slow one delays
all of them. Hence:

- A step hangs after HANG_STEPS times the slowest recent step, but not before HANG_SECONDS. Other phases have their own
  limits. Those of loading data and of a first step come from the run's own history and its plan; LIMITS without them.
- Seconds in which threads of any rank were runnable and got no CPU, and seconds in which an agent itself did not run,
  extend the limit of all ranks.
- A rank that waits for others is never blamed (`craton.telemetry.progress`): the one that they wait for is, by the
  limit of its own phase.
- A rank in a step is blamed only if no rank has moved for that long: while one of them moves, the others wait for it.
  The exception are jobs whose ranks do not wait for each other: a rank that falls two steps behind all others.
- A rank that a signal has stopped cannot move: it is judged alone, by its usual step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from craton.telemetry.progress import RankActivity, find_culprits, find_sleepers

HANG_SECONDS, HANG_STEPS = 4.0, 2.5  # a step hangs if it takes longer than both
LIMITS = {  # maximum seconds without progress, by what a rank is doing
    "waiting": 600.0,
    "start": 900.0,
    "compile": 900.0,
    "data": 300.0,
    "checkpoint": 900.0,
    "evaluate": 900.0,
    "rollout": 900.0,
    "reward": 900.0,
    "sync": 900.0,
    "detect": 60.0,
    "regroup": 120.0,
    "restore": 900.0,
    "idle": 900.0,
}
EAGER_SECONDS = 300.0  # the first step of a run, if it compiles nothing: it still connects to all ranks
KNOWN_SECONDS = 120.0  # minimum for loading data whose usual time is known: a shard may have to be fetched
KNOWN_FIRST_SECONDS = 30.0  # the same for a first step: code that is compiled already, or is compiled as before
KNOWN_STAYS = 10.0  # multiples of the longest recent stay in a phase
DATA_STEPS, PLANNED_STEPS = 100.0, 60.0  # loading data or a first step, in recent and in planned steps
STEPPING = ("productive", "redo")
LOADING = ("data", "rollout", "reward", "sync")  # before the first collective of a step
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
    stay_seconds: float = 0.0  # its longest recent stay in this phase, now or in an earlier generation; 0: unknown
    plan_step_seconds: float = 0.0
    is_eager: bool = False  # its first step compiles nothing
    process_state: str = ""  # R, S, D, T, Z, by the kernel
    is_waiting: bool = False  # by its stack, it waits for other ranks in a collective
    frame: str = ""  # where it waits, if its stack was taken
    sleeps_in: str = ""  # kernel function in which its main thread sleeps

    @property
    def limit(self) -> float:
        """Seconds without progress after which it hangs, if the machine has CPU time for all its threads."""
        if self.is_stopped:
            return max(HANG_SECONDS, HANG_STEPS * self.step_seconds)
        if self.patience:
            return self.patience
        pace = max(self.step_seconds, self.slowest_seconds)
        if self.is_stepping and pace:
            return max(HANG_SECONDS, HANG_STEPS * pace)
        if self.kind in LOADING or self.is_stepping or self.kind == "compile":
            return self._known_limit(pace) or self._first_limit()
        return max(LIMITS.get(self.kind, LIMITS["start"]), KNOWN_STAYS * self.stay_seconds)

    @property
    def is_stepping(self) -> bool:
        return self.kind in STEPPING

    def _known_limit(self, pace: float) -> float:
        """Return the limit of loading data, rollouts or a first step by the run's own history; 0 if there is none."""
        if not (self.stay_seconds or (pace and self.kind == "data")):
            return 0.0
        planned = PLANNED_STEPS * self.plan_step_seconds
        least = KNOWN_SECONDS if self.kind in LOADING else KNOWN_FIRST_SECONDS
        return max(least, DATA_STEPS * pace, KNOWN_STAYS * self.stay_seconds, planned)

    def _first_limit(self) -> float:
        kind = self.kind if self.kind in LOADING else "compile"
        limit = EAGER_SECONDS if kind == "compile" and self.is_eager else LIMITS[kind]
        return max(limit, PLANNED_STEPS * self.plan_step_seconds)

    def as_activity(self, index: int) -> RankActivity:
        return RankActivity(
            index,
            self.kind,
            self.step,
            self.age,
            step_seconds=self.step_seconds,
            patience_seconds=self.patience,
            is_stopped=self.is_stopped,
            process_state=self.process_state,
            is_waiting=self.is_waiting,
            sleeps_in=self.sleeps_in,
        )


def find_hang(ranks: Sequence[RankProgress], failures: int = 0) -> int | None:
    """Return the index of the rank that hangs; None: none does. Each of the `failures` in a row without a new step
    doubles the limit of a step, and that of loading data up to LIMITS: what became slow permanently must not be killed
    again and again."""
    if not ranks:
        return None
    stopped = [index for index, rank in enumerate(ranks) if rank.is_stopped]
    if stopped:
        oldest = max(stopped, key=lambda index: ranks[index].age)
        return oldest if ranks[oldest].age > ranks[oldest].limit else None
    oldest = max(range(len(ranks)), key=lambda index: ranks[index].age)
    culprits = [culprit.rank for culprit in find_culprits([rank.as_activity(at) for at, rank in enumerate(ranks)])]
    impatient = [index for index, rank in enumerate(ranks) if rank.patience]  # they do not wait for each other
    starved = max(rank.starved_seconds for rank in ranks)
    for index in dict.fromkeys([*culprits, *impatient] or [oldest]):
        suspect = ranks[index]
        others = [rank for at, rank in enumerate(ranks) if at != index]
        limit = max([suspect.limit, *(rank.limit for rank in others if _waits_for(suspect, rank))])
        if _still_seconds(suspect, others) > _doubled(limit, suspect, failures) + starved:
            return index
    return None


def are_alike(ranks: Sequence[RankProgress]) -> bool:
    """Whether several ranks all wait in the same line of code at the same step, so that none of them stands out."""
    seen = {(rank.kind, rank.step, rank.frame) for rank in ranks}
    odd = [rank for rank in ranks if rank.is_stopped or rank.process_state in ("D", "T", "Z")]
    return len(ranks) > 1 and len(seen) == 1 and bool(ranks[0].frame) and not odd


def find_sleeper(ranks: Sequence[RankProgress], hanging: int) -> int | None:
    """Return the index of a process of a command that reports nothing and sleeps for something that no other rank ends,
    if the one that hangs seems to wait for it."""
    activities = [rank.as_activity(index) for index, rank in enumerate(ranks)]
    return next((sleeper.rank for sleeper in find_sleepers(activities, [activities[hanging]])), None)


def _doubled(limit: float, suspect: RankProgress, failures: int) -> float:
    doubled = limit * 2.0 ** min(failures, MAX_DOUBLINGS)
    if suspect.patience:
        return limit
    if suspect.is_stepping:
        return doubled
    return max(limit, min(doubled, LIMITS.get(suspect.kind, 0.0)))


def _waits_for(suspect: RankProgress, other: RankProgress) -> bool:
    """Whether the suspect is ahead of another rank, and so most likely waits for it."""
    if not suspect.is_stepping or suspect.patience or not other.step:
        return False
    return other.step < suspect.step or (other.step == suspect.step and other.kind in LOADING)


def _still_seconds(suspect: RankProgress, others: Sequence[RankProgress]) -> float:
    """Return how long the suspect has not moved without a reason to wait."""
    reporting = [rank for rank in others if rank.step]  # a job's own command may report no steps
    is_alone = all(rank.step >= suspect.step + 2 for rank in reporting)
    if suspect.patience or not suspect.is_stepping or is_alone:
        return suspect.age
    return min(suspect.age, *(rank.age for rank in reporting))
