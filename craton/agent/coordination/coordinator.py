"""Decide the members of a run: the next generation after a failure, a lost node, a new node, or a resize.

Pure logic: it receives the agents' messages and the time, and returns actions, so that every decision can be tested
without a process. One agent at a time has one: the first node's agent, and if that is gone, the next one's.

- A rank that exited, raised or hangs: a new generation with the same nodes. `hangs` decides which rank hangs.
- A node to avoid: a spare replaces it, if there is one, and no step is lost. Until all ranks have entered such a
  planned generation, those still in the previous one are watched there, and no other planned generation begins.
- A lost node: a spare replaces it. Without a spare the run waits for it; an elastic run then continues with fewer.
- After `tries` restarts without a new step the run has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from craton.agent.coordination.hangs import RankProgress, are_alike, find_hang, find_sleeper
from craton.agent.generation import Generation
from craton.agent.launch import Launch
from craton.formatting import counted, duration, setting
from craton.telemetry.node import sleeps_for

SILENT_SECONDS = 5.0  # an agent that is silent for this long is lost; it sends several messages a second
ECHO_SECONDS = 0.3  # how long to wait for the root cause of a broken connection
PAUSE_SECONDS = 1.5  # between two ticks, which come several times a second: the coordinator did not run
FRESH_SECONDS = 1.0  # maximum age of an agent's status for hang detection
FIRST_SECONDS = 60.0  # how long a node may take to get ready, after it joined or the run began
RETURN_SECONDS = 0.3  # in which an agent whose connection broke may reconnect
COME_OVER_SECONDS = 1.0  # how long a new coordinator with a pending fault waits for the other agents
SETTLE_SECONDS = 1.0  # a node that joined becomes a member after this time
RELEASE_SECONDS = 5.0  # after the first new step of a smaller generation, before surplus nodes are released


@dataclass
class Member:
    """A node whose agent is connected."""

    node: str
    since: float
    heard: float
    is_ready: bool = False  # its keeper runs and its ranks can be started
    keeper: str = ""
    store: str = ""
    generation: int = -1  # the newest that its agent knows
    done_with: int = -1  # the generation in which all its ranks exited with 0
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    leaving: dict[int, RankProgress] = field(default_factory=dict)  # by their ranks in the previous generation
    done: frozenset[int] = frozenset()  # ranks that exited with 0
    gone_since: float | None = None  # its connection broke
    is_released: bool = False


@dataclass(frozen=True)
class RankFailure:
    """Why a generation cannot continue."""

    text: str
    time: float  # epoch seconds of the last progress
    ranks: tuple[int, ...] = ()  # to kill first
    generation: int | None = None  # in which it happened; None: the current one
    is_final: bool = False  # a retry would fail as well: the run has failed
    is_early: bool = False  # so soon after the first start that a retry is useless, unless a step was done
    is_echo: bool = False  # its connection to another rank broke: most likely that rank is the root cause


@dataclass(frozen=True)
class StartGeneration:
    """Start a generation, after killing the ranks in `end`."""

    generation: Generation
    end: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fail:
    text: str


@dataclass(frozen=True)
class Finish:
    """Every rank has exited with 0."""


@dataclass(frozen=True)
class Release:
    """Release nodes that the run no longer needs."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Notice:
    """An event for users."""

    event: str
    text: str


Action = StartGeneration | Fail | Finish | Release | Notice


class Coordinator:
    def __init__(self, launch: Launch, me: str, current: Generation | None, next_number: int, now: float) -> None:
        """`current` is the running generation that this coordinator takes over, if any."""
        self.launch, self.me, self.current = launch, me, current
        self.members: dict[str, Member] = {}
        self._next_number = next_number
        self._faults: list[RankFailure] = []
        self._failures = current.failures if current else 0
        self._failed_at = current.failed_at if current else -1  # the step of the last failure
        self._reached = current.reached if current else 0
        self._short_since: float | None = None
        self._has_reported_shortage = False
        self._began = now
        self._awaited = set(current.nodes if current else [])  # not connected to this coordinator yet
        self._resized: tuple[int, dict[str, Any] | None] | None = None
        self._avoided: frozenset[str] = frozenset()
        self._finished = False
        self.is_held = False  # the first generation waits for the runs that this one owns
        self._clock = 0.0  # epoch seconds of the last tick
        self._ticked = now
        self._entered_at: int | None = None  # the step at which all ranks had entered the current generation
        self._moving_since: float | None = None

    # -- input ----------------------------------------------------------------------------------------------------

    def joined(self, node: str, now: float) -> None:
        member = self.members.setdefault(node, Member(node, since=now, heard=now))
        member.heard, member.gone_since = now, None
        self._awaited.discard(node)

    def heard(self, node: str, status: Mapping[str, Any], now: float) -> None:
        """Handle a status message of a node's agent."""
        is_new = node not in self.members
        self.joined(node, now)
        member = self.members[node]
        if is_new and self.current and node in self.current.nodes and status.get("generation", -1) < 0:
            self._faults.append(RankFailure(f"{node} is lost: its agent was restarted", self._clock))
        member.is_ready = bool(status.get("ready"))
        member.keeper, member.store = str(status.get("keeper", "")), str(status.get("store", ""))
        member.generation, member.done_with = int(status.get("generation", -1)), int(status.get("done_with", -1))
        member.done = frozenset(int(rank) for rank in status.get("done", ()))
        member.ranks, member.leaving = _progress(status.get("ranks", {})), _progress(status.get("leaving", {}))
        steps = [rank.step for rank in member.ranks.values() if self.current and rank.generation == self.current.number]
        self._reached = max([self._reached, *(step - 1 for step in steps)])

    def left(self, node: str, now: float) -> None:
        """Handle a broken connection to an agent."""
        if (member := self.members.get(node)) is not None and member.gone_since is None:
            member.gone_since = now

    def fault(self, fault: RankFailure) -> None:
        """Handle a fault. Faults of an earlier generation are ignored unless ranks are still in it."""
        if self.current is None:
            return
        is_left = fault.generation == self.current.number - 1 and self._is_being_left()
        if is_left or fault.generation in (None, self.current.number):
            self._faults.append(fault)

    def resize(self, nodes: int, layout: dict[str, Any] | None) -> None:
        self._resized = (nodes, layout)

    def avoid(self, nodes: frozenset[str]) -> None:
        """Set the nodes that the run leaves once it has enough others."""
        self._avoided = nodes

    # -- decisions ------------------------------------------------------------------------------------------------

    def tick(self, now: float, clock: float) -> list[Action]:
        """Return the actions to take now; `clock` is the same moment in epoch seconds."""
        self._clock = clock
        self._forgive_pause(now)
        if self._finished:
            return []
        self._drop_gone(now, clock)
        if self.is_held and self.current is None:
            return []
        if self.current is not None and not self._faults:
            if all(self._is_done(node) for node in self.current.nodes):
                self._finished = True
                return [Finish()]
            self._look_for_hangs(now, clock)
        echoes = self._faults and all(fault.is_echo for fault in self._faults)
        if echoes and clock - min(fault.time for fault in self._faults) < ECHO_SECONDS:
            return []
        is_wrong = not self._reached  # a command that fails at once, before its first step
        final = next((fault for fault in self._faults if fault.is_final or (fault.is_early and is_wrong)), None)
        if final is not None:
            self._finished = True
            early = f"failed within {setting(self.launch.early_seconds)} of its first start, before a step: not retried"
            return [Fail(final.text if final.is_final else f"{final.text}\n{early}")]
        if self.current is not None and any(self._may_return(node, now) for node in self.current.nodes):
            return []
        nodes = self._nodes_of_next(now)
        if isinstance(nodes, Fail):
            self._finished = True
            return [nodes]
        actions: list[Action] = []
        if nodes is None:
            actions += self._tell_shortage()
        elif self.current is None or self._faults or (nodes != self.current.nodes and self._has_entered()):
            actions += self._start(nodes, clock)
        return actions + self._release(now)

    def _forgive_pause(self, now: float) -> None:
        """Do not count seconds in which this coordinator did not run (a frozen or resumed machine) against the agents:
        their messages may be unread."""
        pause, self._ticked = now - self._ticked, now
        if pause > PAUSE_SECONDS:
            self._began += pause
            for member in self.members.values():
                member.heard = min(now, member.heard + pause)

    def _drop_gone(self, now: float, clock: float) -> None:
        for node, member in list(self.members.items()):
            broke = member.gone_since is not None and now - member.gone_since > RETURN_SECONDS
            silent = node != self.me and now - member.heard > SILENT_SECONDS
            if broke or silent:
                del self.members[node]
                if self.current is not None and (node in self.current.nodes or self._leaving(member)):
                    since = now - (member.gone_since if broke and member.gone_since is not None else member.heard)
                    how = "its agent is gone" if broke else f"no heartbeat for {setting(SILENT_SECONDS)}"
                    self._faults.append(RankFailure(f"{node} is lost: {how}", clock - since))
        if self.current is not None and now - self._began > SILENT_SECONDS:
            # after a change of coordinator: nodes that never connected
            for node in self.current.nodes:
                if node not in self.members and not self._faults:
                    self._faults.append(RankFailure(f"{node} is lost: its agent is gone", clock))

    def _look_for_hangs(self, now: float, clock: float) -> None:
        assert self.current is not None
        number, is_left = self.current.number, self._is_being_left()
        watched = [node for node in self.current.nodes if not self._is_done(node)]
        leaving = [node for node, member in self.members.items() if self._leaving(member)]
        waiting: list[tuple[str, tuple[int, ...], RankProgress]] = []  # name, ranks to kill, progress
        for node in [*watched, *leaving]:
            member = self.members.get(node)
            if member is None or now - member.heard > FRESH_SECONDS:
                return  # without fresh status no rank is blamed
            for rank in self.current.ranks_of(node):
                if rank in member.done:
                    continue
                status = member.ranks.get(rank)
                if is_left:  # ranks that have entered wait for those that have not
                    if status is not None and member.generation == number and status.generation == number - 1:
                        waiting.append((f"rank {rank}", (rank,), status))
                elif status is None or status.generation != number:
                    return  # still entering: its agent watches that
                else:
                    waiting.append((f"rank {rank}", (rank,), status))
            for rank, status in self._leaving(member).items():  # their agent ends them with the planned generation
                waiting.append((f"rank {rank}, which leaves {node},", (), status))
        failures = self._failures if self._reached <= self._failed_at else 0
        hanging = find_hang([status for _, _, status in waiting], failures)
        if hanging is not None:
            name, end, last = waiting[hanging]
            doing = "is stopped by a signal" if last.is_stopped else f"hangs in {last.kind}"
            at = f" ({last.frame})" if last.frame else ""
            step = f" at step {last.step}" if last.step else ""
            who = f"{name} {doing}"
            if are_alike([status for _, _, status in waiting]):  # one of them is ended, but none is to blame
                who = f"all {len(waiting)} ranks hang in {last.kind}"
            text = f"{who}{step}: no progress for {duration(last.age)}{at}"
            sleeper = find_sleeper([status for _, _, status in waiting], hanging)
            if sleeper is not None:
                whose, other_end, status = waiting[sleeper]
                what = f"sleeps for {sleeps_for(status.sleeps_in)} ({status.sleeps_in})"
                text = f"{whose} {what}, while {name} waits at step {last.step}: no progress for {duration(last.age)}"
                end = (*end, *other_end)
            self._faults.append(RankFailure(text, clock - last.age, end))

    def _has_entered(self) -> bool:
        """Whether all ranks have entered the current generation, or have exited with 0 there."""
        current = self.current
        return current is not None and all(
            (member := self.members.get(node)) is not None
            and all(
                rank in member.done or (rank in member.ranks and member.ranks[rank].generation == current.number)
                for rank in current.ranks_of(node)
            )
            for node in current.nodes
        )

    def _is_being_left(self) -> bool:
        """Whether ranks still work in the previous generation, before a planned one. Ranks of a job's own command do
        not: they got SIGTERM, and their agents watch that."""
        is_planned = self.current is not None and self.current.is_planned and bool(self.launch.nursery)
        return is_planned and not self._has_entered()

    def _leaving(self, member: Member) -> dict[int, RankProgress]:
        """Return the ranks of a node outside the current generation for which other ranks still wait."""
        if self.current is None or not member.leaving or not self._is_being_left():
            return {}
        return {rank: item for rank, item in member.leaving.items() if item.generation == self.current.number - 1}

    def _may_return(self, node: str, now: float) -> bool:
        """Whether its connection broke a moment ago, or it has not connected yet after a change of coordinator."""
        if (member := self.members.get(node)) is not None:
            return member.gone_since is not None
        return node in self._awaited and now - self._began <= (COME_OVER_SECONDS if self._faults else SILENT_SECONDS)

    def _is_done(self, node: str) -> bool:
        member = self.members.get(node)
        return self.current is not None and member is not None and member.done_with == self.current.number

    def _nodes_of_next(self, now: float) -> list[str] | Fail | None:
        """Return the nodes that the run should have: the current ones if nothing changes, None to wait."""
        order = {node: index for index, node in enumerate(self.launch.nodes)}
        ready = sorted(
            (member.node for member in self.members.values() if member.is_ready and member.gone_since is None),
            key=lambda node: order.get(node, len(order)),
        )
        target = self._resized[0] if self._resized else self.launch.working_nodes
        others = [node for node in ready if node not in self._avoided]
        if len(others) >= target:
            ready = others
        present = self.current.nodes if self.current else []
        staying = [node for node in present if node in ready]
        is_whole = bool(present) and len(staying) == len(present)
        if is_whole:  # a new node becomes a member after SETTLE_SECONDS
            self._short_since = None
            able = [node for node in ready if node in present or now - self.members[node].since >= SETTLE_SECONDS]
            size = target if len(able) >= target else self._size(len(able), target)
            return present if size is None or size <= len(present) <= target else _seated(present, able, size)
        if len(ready) >= target:
            self._short_since = None
            return _seated(present, ready, target)
        size = self._size(len(ready), target)
        if self._short_since is None:
            self._short_since = now
        short = now - self._short_since
        is_coming = not present or any(not member.is_ready for member in self.members.values())
        patience = max(self.launch.spare_seconds, FIRST_SECONDS) if is_coming else self.launch.spare_seconds
        if size is not None and short >= patience:
            self._short_since = None
            return _seated(present, ready, size)
        if short >= self.launch.give_up_seconds:
            missing = [node for node in (present or self.launch.nodes[:target]) if node not in ready]
            return Fail(
                f"{', '.join(missing)} did not come back within "
                f"{setting(self.launch.give_up_seconds)}, and the job needs {counted(target, 'node')}; run "
                f"`craton resume` once they are back, or allow fewer nodes with `cluster: NAME x "
                f"{max(1, len(ready))}.."
                f"{target}`"
            )
        return None

    def _size(self, available: int, target: int) -> int | None:
        """Return the largest number of nodes with which the run can continue; None: it cannot."""
        if not self.launch.min_nodes:
            return None
        sizes = [int(size) for size in self.launch.layouts] + [self.launch.working_nodes]
        fitting = [size for size in sizes if self.launch.min_nodes <= size <= min(available, target)]
        return max(fitting, default=None)

    def _tell_shortage(self) -> list[Action]:
        if self._has_reported_shortage or self.current is None:
            return []
        self._has_reported_shortage = True
        why = "; ".join(fault.text for fault in self._faults) or "too few nodes"
        return [Notice("waiting_for_nodes", f"{why}; waiting for a replacement node")]

    def _start(self, nodes: list[str], clock: float) -> list[Action]:
        faults, self._faults = self._faults, []
        faults = [fault for fault in faults if not fault.is_echo] or faults
        if faults and self.current is not None:
            if self._reached > self._failed_at:
                self._failures = 0
            self._failed_at = self._reached
            self._failures += 1
            if self._failures > self.launch.tries:
                self._finished = True
                return [Fail(self._gave_up(faults))]
        self._has_reported_shortage = False
        first = self.members[nodes[0]]
        generation = Generation(
            number=self._next_number,
            nodes=nodes,
            ranks_per_node=self.launch.ranks_per_node,
            store=first.store,
            keepers={node: self.members[node].keeper for node in nodes if self.members[node].keeper},
            layout=self._layout(len(nodes)),
            reason="; ".join(dict.fromkeys(fault.text for fault in faults)) or self._why(nodes),
            reached=self._reached,
            is_planned=bool(self.current) and not faults,
            broke_at=min((fault.time for fault in faults), default=0.0),
            failures=self._failures,
            failed_at=self._failed_at,
            by=self.me,
            time=clock,
        )
        self._next_number += 1
        self.current = generation
        self._entered_at = self._moving_since = None
        return [StartGeneration(generation, tuple(rank for fault in faults for rank in fault.ranks))]

    def _gave_up(self, faults: Sequence[RankFailure]) -> str:
        text = "; ".join(dict.fromkeys(fault.text for fault in faults))
        if self.launch.tries == 0:
            return text
        where = f"step {self._reached + 1}"
        return f"{text}\nthis was failure {self._failures} in a row at {where} without a new step; not retried again"

    def _layout(self, size: int) -> dict[str, Any] | None:
        if self._resized and self._resized[0] == size and self._resized[1]:
            return self._resized[1]
        return self.launch.layouts.get(str(size))

    def _why(self, nodes: list[str]) -> str:
        if self.current is None:
            return "start"
        if left := [node for node in self.current.nodes if node not in nodes and node in self._avoided]:
            return f"{', '.join(left)} replaced by a spare"
        before, after = len(self.current.nodes), len(nodes)
        change = "grown" if after > before else "shrunk" if after < before else "changed"
        return f"{change} from {before} to {counted(after, 'node')}"

    def _release(self, now: float) -> list[Action]:
        """After `craton resize`, release nodes that are neither needed nor spares."""
        if self._resized is None or self.current is None or len(self.current.nodes) != self._resized[0]:
            return []
        if self._moving_since is None and self._has_moved():
            self._moving_since = now
        if self._moving_since is None or now - self._moving_since < RELEASE_SECONDS:
            return []
        spares = len(self.launch.nodes) - self.launch.working_nodes
        idle = [
            node
            for node in self.launch.nodes
            if node in self.members and node not in self.current.nodes and not self.members[node].is_released
        ]
        surplus = tuple(sorted(idle, key=lambda node: node in self._avoided)[spares:])  # the healthy stay
        for node in surplus:
            self.members[node].is_released = True
        return [Release(surplus)] if surplus else []

    def _has_moved(self) -> bool:
        """Whether a step began after all ranks had entered the current generation."""
        assert self.current is not None
        if not self._has_entered():
            return False
        members = [self.members[node] for node in self.current.nodes]
        step = max((rank.step for member in members for rank in member.ranks.values()), default=0)
        self._entered_at = step if self._entered_at is None else self._entered_at
        return step > self._entered_at


def _progress(ranks: Mapping[Any, Sequence[Any]]) -> dict[int, RankProgress]:
    """Return rank → progress, as its agent reports it."""
    known = len(fields(RankProgress))  # an agent of a later version reports more
    return {int(rank): RankProgress(*values[:known]) for rank, values in ranks.items()}


def _seated(present: Sequence[str], ready: Sequence[str], size: int | None) -> list[str]:
    """Return `size` nodes: working nodes keep their position, others replace the lost ones."""
    assert size is not None
    staying = [node for node in present if node in ready]
    others = [node for node in ready if node not in staying]
    if len(present) != size:
        return [*staying, *others][:size]
    return [node if node in ready else others.pop(0) for node in present]
