"""What a rank does, and after how many seconds without progress it is stuck, by the run's own history or its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_STUCK_SECONDS, STUCK_STEPS = 5.0, 10.0
# A command that does not work any more is stuck long before the job's patience ends; it may sleep in its steps.
IDLE_STUCK_SECONDS, IDLE_BEFORE_SECONDS = 25.0, 20.0
STUCK_STAYS = 3.0  # multiples of the longest recent stay in a phase
FIRST_STUCK_SECONDS, FIRST_STAYS = 10.0, 5.0  # the same before the first step has ended
MIN_STOPPED_SECONDS, STOPPED_STEPS = 1.0, 3.0  # for a rank that a signal has stopped; tools stop ranks for a moment
FIRST_SECONDS = {  # without any history, by phase
    "waiting": 300.0,
    "start": 600.0,  # imports and rendezvous of thousands of ranks take minutes
    "compile": 900.0,
    "data": 60.0,
    "checkpoint": 600.0,  # of a large model to a shared file system
    "evaluate": 900.0,
    "rollout": 900.0,  # without a new token
    "reward": 600.0,
    "sync": 600.0,
    "detect": 60.0,
    "regroup": 120.0,
    "restore": 600.0,
}
EAGER_SECONDS, EAGER_STEPS = 60.0, 20.0  # a first step that compiles nothing; multiples of the planned step
STEPPING = ("productive", "redo", "")


@dataclass(frozen=True)
class RankActivity:
    """What a rank does, and what is known about how long that usually takes. 0: unknown."""

    rank: int
    kind: str  # of telemetry.LEDGER_KINDS; "": unknown
    step: int
    age_seconds: float  # since its last progress
    node: str = ""
    step_seconds: float = 0.0
    slowest_seconds: float = 0.0
    starved_seconds: float = 0.0
    patience_seconds: float = 0.0
    limit_seconds: float = 0.0  # after which its agent ends it
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    is_stopped: bool = False
    is_eager: bool = False
    process_state: str = ""
    frame: str = ""
    is_waiting: bool = False
    sleeps_in: str = ""  # kernel function
    idle_seconds: float = 0.0  # for which its processes have used no CPU to speak of

    @property
    def pace_seconds(self) -> float:
        """The slowest recent step; 0 before the first one has ended."""
        return max(self.slowest_seconds, self.step_seconds)

    @property
    def is_silent(self) -> bool:
        """Whether it is a process of a command that never reported progress."""
        return not self.step and not self.age_seconds and self.kind in (*STEPPING, "start")

    @property
    def is_idle(self) -> bool:
        """Whether its processes have used no CPU for long, and did so before: work that is not theirs never shows."""
        since_step = self.age_seconds + IDLE_BEFORE_SECONDS
        least = max(IDLE_STUCK_SECONDS, STUCK_STEPS * self.pace_seconds)
        return self.process_state != "D" and least <= self.idle_seconds <= since_step


def stuck_after(rank: RankActivity, usual: Mapping[str, float], plan_step_seconds: float = 0.0) -> float:
    """Return the seconds without progress after which a rank is stuck, if the machine has CPU time for all ranks.
    `usual`: phase → longest recent stay of any rank."""
    if rank.is_stopped:
        return stopped_after(rank)
    if rank.patience_seconds:
        limit = max(IDLE_STUCK_SECONDS, STUCK_STEPS * rank.pace_seconds)
        return min(limit, rank.patience_seconds) if rank.is_idle and rank.pace_seconds else rank.patience_seconds
    pace, stay, is_known = rank.pace_seconds, usual.get(rank.kind, 0.0), rank.kind in usual
    if not pace:
        if is_known and rank.kind not in STEPPING:
            return max(FIRST_STUCK_SECONDS, FIRST_STAYS * stay, STUCK_STEPS * plan_step_seconds)
        return first_seconds("compile" if rank.kind in STEPPING else rank.kind, rank.is_eager, plan_step_seconds)
    in_steps = max(MIN_STUCK_SECONDS, STUCK_STEPS * pace)
    if rank.kind in STEPPING:
        # An agent of an earlier version reports neither the slowest step nor the job's own limit.
        return in_steps if rank.slowest_seconds else max(in_steps, rank.limit_seconds)
    if rank.kind == "data":
        return max(in_steps, STUCK_STAYS * stay)
    first = first_seconds(rank.kind, rank.is_eager, plan_step_seconds)
    return max(in_steps, STUCK_STAYS * stay if is_known else first)


def first_seconds(kind: str, is_eager: bool, plan_step_seconds: float) -> float:
    """Return the limit of a phase that no rank of the run has completed yet."""
    if kind == "compile" and is_eager:
        return max(EAGER_SECONDS, EAGER_STEPS * plan_step_seconds)
    return max(FIRST_SECONDS.get(kind, FIRST_SECONDS["start"]), STUCK_STEPS * plan_step_seconds)


def stopped_after(rank: RankActivity) -> float:
    """Return the same for a rank that a signal has stopped."""
    return max(MIN_STOPPED_SECONDS, STOPPED_STEPS * rank.step_seconds)
