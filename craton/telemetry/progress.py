"""Whether a run makes progress: one pure function for `ps`, `top`, the web page and `craton why`.

Ranks of a training run wait for each other in every step, so one blocked rank stops all of them. The function finds the
rank that the others wait for, and compares the time since its last progress with the run's own history:

- In a step or while it loads data: STUCK_STEPS times the slowest recent step, but not before MIN_STUCK_SECONDS.
- In another phase also STUCK_STAYS times the longest recent stay of any rank in that phase: a usual save, an earlier
  evaluation, the first step of the previous generation.
- Without any history: FIRST_SECONDS, or what the plan implies.
- Seconds in which threads of a rank were runnable and got no CPU, or an agent did not run, do not count.

Ranks that wait for another one are never named. These are named, in this order: ranks that a signal has stopped, ranks
in an earlier step, ranks in another phase than a step, ranks that sleep in the kernel, ranks whose stack is not in a
collective, the only ranks that use a CPU, ranks that stopped well before the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from craton.formatting import counted, whole_duration
from craton.telemetry.node import NodeStatus

ProgressState = Literal["moving", "starting", "recovering", "stuck", "unknown"]
MIN_STUCK_SECONDS, STUCK_STEPS = 5.0, 10.0
STUCK_STAYS = 3.0  # multiples of the longest recent stay in a phase
FIRST_STUCK_SECONDS, FIRST_STAYS = 10.0, 5.0  # the same before the first step has ended
MIN_STOPPED_SECONDS, STOPPED_STEPS = 1.0, 3.0  # for a rank that a signal has stopped; tools stop ranks for a moment
NOTED_SECONDS = 5.0  # in a phase of unknown length, after which the rank that others wait for is named
FIRST_SECONDS = {  # without any history, by phase
    "waiting": 300.0,
    "start": 600.0,  # imports and rendezvous of thousands of ranks take minutes
    "compile": 900.0,
    "data": 60.0,
    "checkpoint": 300.0,
    "evaluate": 900.0,
    "detect": 60.0,
    "regroup": 120.0,
    "restore": 600.0,
}
EAGER_SECONDS, EAGER_STEPS = 60.0, 20.0  # a first step that compiles nothing; multiples of the planned step
STEPPING = ("productive", "redo", "")
IN_A_STEP = (*STEPPING, "compile")  # `compile` is the whole first step, with its collectives
COMING_BACK = ("detect", "regroup", "restore")
EARLY_SECONDS, EARLY_STEPS = 1.0, 0.25  # a rank that stopped this much before the others stopped first
SILENT_AGENT_SECONDS = 5.0  # status is written every two seconds; an older one says nothing about its ranks


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

    @property
    def pace_seconds(self) -> float:
        """The slowest recent step; 0 before the first one has ended."""
        return max(self.slowest_seconds, self.step_seconds)

    @property
    def is_silent(self) -> bool:
        """Whether it is a process of a command that never reported progress."""
        return not self.step and not self.age_seconds and self.kind in STEPPING


@dataclass(frozen=True)
class Progress:
    """Whether a run moves; if not, since when, and which ranks the others wait for."""

    state: ProgressState
    seconds: float = 0.0  # since the last progress of the first of these ranks
    since: float | None = None  # the same as epoch seconds
    ranks: tuple[int, ...] = ()  # that the others wait for, the oldest first; of a moving run: that is worth a note
    nodes: tuple[str, ...] = ()
    kind: str = ""  # phase of the first of them
    step: int = 0
    frame: str = ""
    is_stopped: bool = False  # by a signal
    num_waiting: int = 0  # other ranks
    steps_missed: float = 0.0  # seconds as a multiple of the usual step; 0: unknown
    limit_seconds: float = 0.0  # after which the agent ends it; 0: unknown
    stands_out: bool = True  # False: these ranks wait for each other, and none of them is to blame

    @property
    def is_stuck(self) -> bool:
        return self.state == "stuck"

    @property
    def who(self) -> str:
        """`rank 1`, `ranks 1, 3 and 5`, `8 ranks`."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        if len(self.ranks) <= 3:
            return f"ranks {', '.join(map(str, self.ranks[:-1]))} and {self.ranks[-1]}"
        return counted(len(self.ranks), "rank")

    @property
    def doing(self) -> str:
        """`in data`, `stopped by a signal`."""
        if self.is_stopped:
            return "stopped by a signal"
        return f"in {self.kind}" if self.kind else "in an unknown phase"

    @property
    def text(self) -> str:
        """`stuck 2m 5s: rank 1 in data`; the state alone if nothing is stuck."""
        if not self.is_stuck:
            return self.state
        where = f": {self.who} {self.doing}" if self.ranks else ""
        return f"stuck {whole_duration(self.seconds)}{where}"

    @property
    def sentence(self) -> str:
        """Say what the run waits for; "" if it waits for nothing."""
        if not self.ranks:
            return f"no rank has made progress for {whole_duration(self.seconds)}" if self.is_stuck else ""
        have = "has" if len(self.ranks) == 1 else "have"
        at = f" at step {self.step:,}" if self.step else ""
        times = f", {self.steps_missed:,.0f} times its usual step" if self.steps_missed >= 2 else ""
        text = f"{self.who} {have} been {self.doing} for {whole_duration(self.seconds)}{at}{times}"
        text += f" ({self.frame})" if self.frame else ""
        if self.num_waiting and self.stands_out:
            waits = "waits" if self.num_waiting == 1 else "wait"
            text += (
                f"; {counted(self.num_waiting, 'other rank')} {waits} for {'it' if len(self.ranks) == 1 else 'them'}"
            )
        if self.limit_seconds > self.seconds and math.isfinite(self.limit_seconds):
            text += f"; not yet ended by its agent (limit {whole_duration(self.limit_seconds)})"
        return text


UNKNOWN = Progress("unknown")


def assess_progress(
    ranks: Sequence[RankActivity], now: float, *, plan_step_seconds: float = 0.0, is_restarted: bool = False
) -> Progress:
    """Return whether the run of these ranks makes progress at the epoch second `now`. `is_restarted`: an earlier
    generation of this start failed."""
    watched = [rank for rank in ranks if rank.kind != "idle" and not rank.is_silent]
    if not watched:
        return UNKNOWN
    stopped = [rank for rank in watched if rank.is_stopped and rank.age_seconds >= _stopped_after(rank)]
    if stopped:
        return _progress("stuck", _oldest_first(stopped), watched, now)
    culprits = find_culprits(watched)
    usual = _usual(watched)
    starved = max(rank.starved_seconds for rank in watched)
    if culprits:
        late = [
            rank
            for rank in culprits
            if _still_seconds(rank, watched) - starved > stuck_after(rank, usual, plan_step_seconds)
        ]
        if late:
            return _progress("stuck", late, watched, now)
    else:
        # They may wait for each other: the last one to stop counts, and the longest limit among them.
        still = min(rank.age_seconds for rank in watched)
        limit = max(stuck_after(rank, usual, plan_step_seconds) for rank in watched)
        if still - starved > limit:
            return _progress("stuck", _oldest_first(watched), watched, now, stands_out=len(watched) == 1)
    is_new = not any(rank.pace_seconds or rank.patience_seconds for rank in watched)
    is_back = any(rank.kind in COMING_BACK for rank in watched)
    state: ProgressState = "moving"
    if is_back or (is_new and is_restarted):
        state = "recovering"
    elif is_new and any(rank.kind not in STEPPING for rank in watched):
        state = "starting"
    noted = [rank for rank in culprits if rank.age_seconds - starved > _noted_after(rank)]
    return _progress(state, noted, watched, now) if noted else Progress(state)


def activities_of(statuses: Iterable[NodeStatus | None], now: float) -> list[RankActivity]:
    """Return the ranks of all nodes. Ages are counted until `now`; the time in which an agent was silent is not held
    against its ranks."""
    return [
        RankActivity(
            rank=rank.rank,
            kind=rank.kind,
            step=rank.step,
            age_seconds=rank.progress_age_seconds + status_age if rank.progress_age_seconds else 0.0,
            node=status.node,
            step_seconds=rank.step_seconds,
            slowest_seconds=rank.slowest_seconds,
            starved_seconds=rank.starved_seconds + silent_seconds(status_age),
            patience_seconds=rank.patience_seconds,
            limit_seconds=rank.progress_limit_seconds,
            phase_seconds=rank.phase_seconds,
            is_stopped=rank.is_stopped,
            is_eager=rank.is_eager,
            process_state=rank.process_state,
            frame=rank.frame,
            is_waiting=rank.is_waiting,
        )
        for status in statuses
        if status is not None
        for status_age in (max(0.0, now - status.time),)
        for rank in status.ranks
    ]


def silent_seconds(status_age: float) -> float:
    """Return the seconds for which an agent did not report, from the age of its status."""
    return max(0.0, status_age - SILENT_AGENT_SECONDS)


def stuck_after(rank: RankActivity, usual: Mapping[str, float], plan_step_seconds: float = 0.0) -> float:
    """Return the seconds without progress after which a rank is stuck, if the machine has CPU time for all ranks.
    `usual`: phase → longest recent stay of any rank."""
    if rank.is_stopped:
        return _stopped_after(rank)
    if rank.patience_seconds:
        return rank.patience_seconds
    pace, stay = rank.pace_seconds, usual.get(rank.kind, 0.0)
    if not pace:
        if stay and rank.kind not in STEPPING:
            return max(FIRST_STUCK_SECONDS, FIRST_STAYS * stay, STUCK_STEPS * plan_step_seconds)
        return first_seconds("compile" if rank.kind in STEPPING else rank.kind, rank.is_eager, plan_step_seconds)
    in_steps = max(MIN_STUCK_SECONDS, STUCK_STEPS * pace)
    if rank.kind in (*STEPPING, "data"):
        return max(in_steps, STUCK_STAYS * stay if rank.kind == "data" else 0.0)
    return max(in_steps, STUCK_STAYS * stay if stay else first_seconds(rank.kind, rank.is_eager, plan_step_seconds))


def first_seconds(kind: str, is_eager: bool, plan_step_seconds: float) -> float:
    """Return the limit of a phase that no rank of the run has completed yet."""
    if kind == "compile" and is_eager:
        return max(EAGER_SECONDS, EAGER_STEPS * plan_step_seconds)
    return max(FIRST_SECONDS.get(kind, FIRST_SECONDS["start"]), STUCK_STEPS * plan_step_seconds)


def find_culprits(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return the ranks that the others wait for, the oldest first; empty if none stands out."""
    ranks = [rank for rank in ranks if not rank.is_silent]
    if len(ranks) < 2:
        return list(ranks)
    chosen = (
        _some([rank for rank in ranks if rank.is_stopped or rank.process_state in ("T", "Z")], ranks)
        or _some(_behind(ranks), ranks)
        or _some(_apart(ranks), ranks)
        or _some([rank for rank in ranks if rank.process_state == "D"], ranks)
        or _some([rank for rank in ranks if not rank.is_waiting], ranks)
        or _some(_busy(ranks), ranks)
        or _early(ranks)
    )
    return _oldest_first(chosen)


def _some(chosen: list[RankActivity], ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return the chosen ranks, unless all are chosen: then none stands out."""
    return chosen if len(chosen) < len(ranks) else []


def _behind(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    steps = [rank.step for rank in ranks]
    behind = [rank for rank in ranks if rank.step == min(steps)] if min(steps) < max(steps) else []
    return _apart(behind) or behind


def _apart(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks in another phase than a step; a first step that compiles counts if no other phase does."""
    return [rank for rank in ranks if rank.kind not in IN_A_STEP] or [
        rank for rank in ranks if rank.kind not in STEPPING
    ]


def _busy(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    """Return ranks that use a CPU while most others sleep in a receive. Ranks that wait for a GPU use one too."""
    running = [rank for rank in ranks if rank.process_state == "R"]
    is_known = all(rank.process_state in ("R", "S") for rank in ranks)
    return running if 2 * len(running) <= len(ranks) and is_known else []


def _early(ranks: Sequence[RankActivity]) -> list[RankActivity]:
    oldest = max(rank.age_seconds for rank in ranks)
    paces = sorted(rank.step_seconds for rank in ranks)
    margin = max(EARLY_SECONDS, EARLY_STEPS * paces[len(paces) // 2])
    early = [rank for rank in ranks if rank.age_seconds > oldest - margin]
    return early if 2 * len(early) <= len(ranks) else []


def _still_seconds(rank: RankActivity, ranks: Sequence[RankActivity]) -> float:
    """Return how long a rank has not moved without a reason to wait: while another rank in its step moves, it may wait
    for that one. Ranks that do not wait for each other fall two steps behind."""
    others = [other for other in ranks if other is not rank and other.step]
    is_alone = all(other.step >= rank.step + 2 for other in others)
    if rank.patience_seconds or rank.kind not in STEPPING or is_alone:
        return rank.age_seconds
    return min(rank.age_seconds, *(other.age_seconds for other in others))


def _stopped_after(rank: RankActivity) -> float:
    return max(MIN_STOPPED_SECONDS, STOPPED_STEPS * rank.step_seconds)


def _noted_after(rank: RankActivity) -> float:
    """Return when a rank in a phase of unknown length is named, long before it counts as stuck."""
    return max(NOTED_SECONDS, STUCK_STEPS * rank.pace_seconds)


def _usual(ranks: Iterable[RankActivity]) -> dict[str, float]:
    usual: dict[str, float] = {}
    for rank in ranks:
        for kind, seconds in rank.phase_seconds.items():
            usual[kind] = max(usual.get(kind, 0.0), seconds)
    return usual


def _oldest_first(ranks: Iterable[RankActivity]) -> list[RankActivity]:
    return sorted(ranks, key=lambda rank: (-rank.age_seconds, rank.rank))


def _progress(
    state: ProgressState,
    named: Sequence[RankActivity],
    ranks: Sequence[RankActivity],
    now: float,
    stands_out: bool = True,
) -> Progress:
    first = named[0]
    seconds = first.age_seconds
    return Progress(
        state,
        seconds=seconds,
        since=now - seconds,
        ranks=tuple(rank.rank for rank in named),
        nodes=tuple(dict.fromkeys(rank.node for rank in named if rank.node)),
        kind=first.kind,
        step=first.step,
        frame=first.frame,
        is_stopped=first.is_stopped,
        num_waiting=len(ranks) - len(named),
        steps_missed=seconds / first.step_seconds if first.step_seconds else 0.0,
        limit_seconds=first.limit_seconds,
        stands_out=stands_out,
    )
