"""Whether a run makes progress: one pure function for `ps`, `top`, the web page and `craton why`.

Ranks of a training run wait for each other in every step, so one blocked rank stops all of them. The function finds the
rank that the others wait for, and compares the time since its last progress with the run's own history:

- In a step or while it loads data: STUCK_STEPS times the slowest recent step, but not before MIN_STUCK_SECONDS.
- In another phase also STUCK_STAYS times the longest recent stay of any rank in that phase: a usual save, an earlier
  evaluation, the first step of the previous generation.
- Without any history: FIRST_SECONDS, or what the plan implies.
- Seconds in which threads of a rank were runnable and got no CPU, or an agent did not run, do not count.

Ranks that wait for another one are never named. These are named, in this order: ranks that a signal has stopped, ranks
in an earlier step, ranks in another phase than a step, ranks that sleep uninterruptibly, ranks whose stack is not in a
collective, ranks that sleep for something that no other rank ends (a timer, a pipe, a lock, a file), the only ranks
that use a CPU, ranks that stopped well before the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from craton.formatting import counted, whole_duration
from craton.telemetry.node import NodeStatus, RankStatus
from craton.telemetry.progress.culprits import find_culprits, find_sleepers, oldest_first
from craton.telemetry.progress.limits import STEPPING, RankActivity, stopped_after, stuck_after

ProgressState = Literal["moving", "starting", "recovering", "stuck", "unknown"]
NOTED_SECONDS, NOTED_STEPS = 5.0, 3.0  # after which the rank that others wait for is named, before it is stuck
COMING_BACK = ("detect", "regroup", "restore")
MAX_LIMIT_SECONDS = 1e6  # a longer limit of an agent means none
SILENT_AGENT_SECONDS = 5.0  # maximum age of a status that counts; it is written every two seconds


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
        if self.is_stuck:
            return f"{self.text}{self._details()}"
        if not self.ranks:
            return ""
        have = "has" if len(self.ranks) == 1 else "have"
        return f"{self.who} {have} been {self.doing} for {whole_duration(self.seconds)}{self._details()}"

    def _details(self) -> str:
        if not self.ranks:
            return ""
        text = f" at step {self.step:,}" if self.step else ""
        if self.steps_missed >= 2:
            text += f", {self.steps_missed:,.0f} times {'its' if len(self.ranks) == 1 else 'their'} usual step"
        text += f" ({self.frame})" if self.frame else ""
        if self.num_waiting and self.stands_out:
            waits = "waits" if self.num_waiting == 1 else "wait"
            text += (
                f"; {counted(self.num_waiting, 'other rank')} {waits} for {'it' if len(self.ranks) == 1 else 'them'}"
            )
        if self.seconds < self.limit_seconds < MAX_LIMIT_SECONDS:
            text += f"; not yet ended by its agent (limit {whole_duration(self.limit_seconds)})"
        return text


UNKNOWN_PROGRESS: Progress = Progress("unknown")


def assess_progress(
    ranks: Sequence[RankActivity], now: float, *, plan_step_seconds: float = 0.0, is_restarted: bool = False
) -> Progress:
    """Return whether the run of these ranks makes progress at the epoch second `now`. `is_restarted`: an earlier
    generation of this start failed."""
    watched = [rank for rank in ranks if rank.kind != "idle" and not rank.is_silent]
    if not watched:
        return UNKNOWN_PROGRESS
    stopped = [rank for rank in watched if rank.is_stopped and rank.age_seconds >= stopped_after(rank)]
    if stopped:
        return _progress("stuck", oldest_first(stopped), watched, now)
    culprits = find_culprits(watched)
    usual = usual_stays(watched)
    starved = max(rank.starved_seconds for rank in watched)
    if culprits:
        late = [
            rank
            for rank in culprits
            if _still_seconds(rank, watched) - starved > stuck_after(rank, usual, plan_step_seconds)
        ]
        if late and (sleepers := find_sleepers(ranks, late)):
            return _progress("stuck", sleepers, [*watched, *sleepers], now)
        if late:
            reports_alone = len(watched) == 1 < len(ranks)  # the other ranks may be to blame, and report nothing
            return _progress("stuck", late, watched, now, stands_out=not reports_alone)
    else:
        # They may wait for each other: the last one to stop counts, and the longest limit among them.
        still = min(rank.age_seconds for rank in watched)
        limit = max(stuck_after(rank, usual, plan_step_seconds) for rank in watched)
        if still - starved > limit:
            return _progress("stuck", oldest_first(watched), watched, now, stands_out=len(watched) == 1)
    is_new = not any(rank.pace_seconds or rank.patience_seconds for rank in watched)
    is_back = any(rank.kind in COMING_BACK for rank in watched)
    state: ProgressState = "moving"
    if is_back or (is_new and is_restarted):
        state = "recovering"
    elif is_new and any(rank.kind not in STEPPING for rank in watched):
        state = "starting"
    noted = [rank for rank in culprits if _still_seconds(rank, watched) - starved > _noted_after(rank)]
    if sleepers := find_sleepers(ranks, noted):
        return _progress(state, sleepers, [*watched, *sleepers], now)
    return _progress(state, noted, watched, now) if noted else Progress(state)


def activities_of(statuses: Iterable[NodeStatus | None], now: float) -> list[RankActivity]:
    """Return the ranks of all nodes, at the epoch second `now`."""
    return [
        RankActivity(
            rank=rank.rank,
            kind=rank.kind,
            step=rank.step,
            age_seconds=age_of(rank, status_age),
            node=status.node,
            step_seconds=rank.step_seconds,
            slowest_seconds=rank.slowest_seconds,
            starved_seconds=rank.starved_seconds,
            patience_seconds=rank.patience_seconds,
            limit_seconds=rank.progress_limit_seconds,
            phase_seconds=rank.phase_seconds,
            is_stopped=rank.is_stopped,
            is_eager=rank.is_eager,
            process_state=rank.process_state,
            frame=rank.frame,
            is_waiting=rank.is_waiting,
            sleeps_in=rank.resources.sleeps_in,
            idle_seconds=rank.resources.idle_seconds,
        )
        for status in statuses
        if status is not None
        for status_age in (status.age_seconds(now),)
        for rank in status.ranks
    ]


def age_of(rank: RankStatus, status_age: float) -> float:
    """Return the seconds since a rank's last progress, from its status and the age of that. An agent that has not
    reported for longer says nothing about its ranks, and the clocks of two machines may differ."""
    return rank.progress_age_seconds + min(status_age, SILENT_AGENT_SECONDS) if rank.progress_age_seconds else 0.0


def _still_seconds(rank: RankActivity, ranks: Sequence[RankActivity]) -> float:
    """Return how long a rank has not moved without a reason to wait: while another rank in its step moves, it may wait
    for that one. Ranks that do not wait for each other fall two steps behind."""
    others = [other for other in ranks if other is not rank and other.step]
    is_alone = all(other.step >= rank.step + 2 for other in others)
    if rank.patience_seconds or rank.kind not in STEPPING or is_alone:
        return rank.age_seconds
    return min(rank.age_seconds, *(other.age_seconds for other in others))


def _noted_after(rank: RankActivity) -> float:
    """Return when a rank in a phase of unknown length is named, long before it counts as stuck."""
    return max(NOTED_SECONDS, NOTED_STEPS * rank.pace_seconds)


def usual_stays(ranks: Iterable[RankActivity]) -> dict[str, float]:
    """Return phase → longest recent stay of any of these ranks."""
    usual: dict[str, float] = {}
    for rank in ranks:
        for kind, seconds in rank.phase_seconds.items():
            usual[kind] = max(usual.get(kind, 0.0), seconds)
    return usual


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
        num_waiting=sum(1 for rank in ranks if rank not in named and rank.age_seconds > rank.pace_seconds),
        steps_missed=seconds / first.step_seconds if first.step_seconds else 0.0,
        limit_seconds=first.limit_seconds,
        stands_out=stands_out,
    )
