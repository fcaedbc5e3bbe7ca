"""The nodes of a run by leaf, and the health of each: from its heartbeat, its agent's rank status, and its speed.

Health is one word per node, the worst that applies: `lost` (its agent is silent), `stopped` (a signal stopped a rank),
`stuck` (the others wait for one of its ranks, which makes no progress), `slow` (it has a straggler), `alert` (a
Prometheus alert fires for it), otherwise the state in its heartbeat. Spares are nodes too: a silent one cannot replace
another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from craton.agent.coordination import read_avoided
from craton.formatting import whole_duration
from craton.telemetry import RunDirectory, read_json
from craton.telemetry.files import names_in
from craton.telemetry.node import LOST_SECONDS, Heartbeat, NodeStatus, RankStatus, read_heartbeat, read_status
from craton.telemetry.progress import Progress, activities_of, assess_progress

# The worst first; a node has the first that applies.
HEALTH = ("lost", "stopped", "stuck", "slow", "alert", "running", "spare", "done", "released", "unknown")
BAD = HEALTH[:5]
READ_AGAIN_SECONDS = 10.0  # an unchanged inode may belong to a new file: inodes are reused


@dataclass(frozen=True)
class NodeMember:
    """The members of the run's newest generation."""

    generation: int
    nodes: list[str]  # in rank order
    ranks_per_node: int
    leaves: dict[str, str]
    spares: tuple[str, ...] = ()  # may join the next generation
    num_stages: int = 1  # of the pipeline
    is_accelerated: bool | None = None  # whether ranks compute on GPUs; None: not known


@dataclass(frozen=True)
class NodeView:
    node: str
    leaf: str
    health: str
    reason: str  # why its health is bad; empty when it is good
    ranks: str  # one letter per rank: the first of its ledger kind, "!" for a problem; a spare has none
    first_rank: int
    heartbeat_age_seconds: float | None
    is_spare: bool = False


def read_member(run: RunDirectory) -> NodeMember:
    """Read the newest generation, or the launch file before there is one."""
    launch = read_json(run.launch_path)
    first_generation = launch.get("generation")
    started = first_generation if isinstance(first_generation, int) else 0
    try:
        names = [name for name in names_in(run.path / "generations") if name[:-5].isdecimal()]
    except OSError:
        names = []
    newest = max((int(name[:-5]) for name in names), default=-1)
    document = read_json(run.generation_path(newest)) if newest >= started else {}
    nodes = document.get("nodes") or (launch.get("nodes") or [])[: launch.get("num_nodes") or None]
    members = {str(node) for node in nodes}
    others = [node for node in launch.get("nodes") or () if isinstance(node, str) and node not in members]
    avoided = read_avoided(run) if others else {}
    leaves = launch.get("leaves")
    layout = document.get("layout") or read_json(run.plan_path).get("layout")
    stages = layout.get("pp") if isinstance(layout, dict) else None
    return NodeMember(
        generation=newest if document else started,
        nodes=[str(node) for node in nodes if isinstance(node, str)],
        ranks_per_node=int(document.get("ranks_per_node") or launch.get("ranks_per_node") or 1),
        leaves={str(node): str(leaf) for node, leaf in leaves.items()} if isinstance(leaves, dict) else {},
        spares=tuple(node for node in others if node not in avoided),
        num_stages=stages if isinstance(stages, int) and stages > 0 else 1,
        is_accelerated=bool(launch["gpus"]) if "gpus" in launch else None,
    )


@dataclass(frozen=True)
class _Told:
    """The rank status of a node's agent, by inode and mtime of the file."""

    key: tuple[int, int]
    status: NodeStatus | None


class Nodes:
    """Read all nodes repeatedly; unchanged files are not read again."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        # Heartbeat and status paths of a node: building a path costs as much as a stat.
        self._paths: dict[str, tuple[str, str]] = {}
        # By inode, because a touch changes only the mtime; with the time of reading.
        self._beats: dict[str, tuple[int, float, Heartbeat | None]] = {}
        self._told: dict[str, _Told] = {}

    def look(
        self,
        member: NodeMember,
        slow_nodes: Collection[str],
        alerted: Collection[str],
        movement: Progress | None = None,
    ) -> list[NodeView]:
        """Return all nodes. `movement`: of the run's summary, so that both agree; computed here without it."""
        now = time.monotonic()
        statuses = {node: self._current(node, member.generation) for node in member.nodes}
        if movement is None:
            moment = time.time()
            movement = assess_progress(activities_of(statuses.values(), moment), moment)
        stuck = frozenset(movement.ranks if movement.is_stuck else ())
        views = []
        for number, node in enumerate(member.nodes):
            beat, age = self._beat(node, now)
            status = statuses[node]
            ranks = status.ranks if status else ()
            is_live = beat is not None and beat.state == "running"
            trouble = _trouble(ranks, stuck, movement) if is_live else None
            health, reason = _health(node, beat, age, trouble, slow_nodes, alerted)
            views.append(
                NodeView(
                    node=node,
                    leaf=member.leaves.get(node, ""),
                    health=health,
                    reason=reason,
                    ranks=_letters(ranks, stuck) if status else "?" * member.ranks_per_node,
                    first_rank=number * member.ranks_per_node,
                    heartbeat_age_seconds=age,
                )
            )
        return [*views, *self._spares(member, now, alerted)]

    def _spares(self, member: NodeMember, now: float, alerted: Collection[str]) -> Iterator[NodeView]:
        """Yield the spare nodes, except those that have left or not yet arrived."""
        for node in member.spares:
            beat, age = self._beat(node, now)
            if beat is None or beat.state != "spare":
                continue
            health, reason = _health(node, beat, age, None, (), alerted)
            reason = f"a spare: {reason}" if reason else ""
            yield NodeView(node, member.leaves.get(node, ""), health, reason, "", 0, age, is_spare=True)

    def status(self, node: str) -> NodeStatus | None:
        """Return the rank status of the node's agent at the last read."""
        tail = self._told.get(node)
        return tail.status if tail else None

    def _tell(self, node: str) -> _Told | None:
        try:
            file_status = os.stat(self._path(node)[1])
        except OSError:
            self._told.pop(node, None)
            return None
        key = (file_status.st_ino, file_status.st_mtime_ns)
        result = self._told.get(node)
        if result is None or result.key != key:
            result = self._told[node] = _Told(key, read_status(self._run, node))
        return result

    def _current(self, node: str, generation: int) -> NodeStatus | None:
        """Return the rank status of a node, if it is of this generation."""
        tail = self._tell(node)
        status = tail.status if tail else None
        return status if status is not None and status.generation == generation else None

    def _beat(self, node: str, now: float) -> tuple[Heartbeat | None, float | None]:
        try:
            status = os.stat(self._path(node)[0])
        except OSError:
            return None, None
        entry = self._beats.get(node)
        if entry is None or entry[0] != status.st_ino or now - entry[1] >= READ_AGAIN_SECONDS:
            entry = self._beats[node] = (status.st_ino, now, read_heartbeat(self._run, node))
        beat = entry[2] and replace(entry[2], moment=status.st_mtime)
        return beat, max(0.0, beat.age_seconds() if beat else time.time() - status.st_mtime)

    def _path(self, node: str) -> tuple[str, str]:
        if node not in self._paths:
            self._paths[node] = (str(self._run.heartbeat_path(node)), str(self._run.status_path(node)))
        return self._paths[node]


def _health(
    node: str,
    beat: Heartbeat | None,
    age: float | None,
    trouble: tuple[str, str] | None,
    slow_nodes: Collection[str],
    alerted: Collection[str],
) -> tuple[str, str]:
    if beat is None or age is None:
        return "unknown", ""
    if beat.state in ("running", "spare") and age > LOST_SECONDS:
        return "lost", f"its agent was last seen {whole_duration(age)} ago"
    if trouble is not None:
        return trouble
    if beat.state == "running" and node in slow_nodes:
        return "slow", "the other ranks wait for one of its ranks"
    if beat.state in ("running", "spare") and node in alerted:
        return "alert", "Prometheus has an alert for it"
    state = "done" if beat.state in ("done", "stopped", "failed") else beat.state
    return (state if state in HEALTH else "unknown"), ""


def _trouble(ranks: Sequence[RankStatus], stuck: Collection[int], movement: Progress) -> tuple[str, str] | None:
    """Return health and reason of the worst rank."""
    for rank in ranks:
        if rank.is_stopped:
            return "stopped", f"rank {rank.rank} is stopped by a signal or a debugger"
    for rank in ranks:
        if rank.rank in stuck:
            age = whole_duration(max(rank.progress_age_seconds, movement.seconds))
            where = f", {rank.frame}" if rank.frame else ""
            return "stuck", f"rank {rank.rank} has made no progress for {age} ({rank.kind}{where})"
    return None


def _letters(ranks: Sequence[RankStatus], stuck: Collection[int]) -> str:
    return "".join("!" if rank.is_stopped or rank.rank in stuck else rank.kind[:1] for rank in ranks)


def topology(views: list[NodeView]) -> dict[str, Any]:
    """Return the data that the page draws: leaves in the order of their first node, each with its nodes."""
    leaves: dict[str, list[Any]] = {}
    for view in views:
        leaves.setdefault(view.leaf, []).append([view.node, HEALTH.index(view.health), view.ranks, view.first_rank])
    return {"health": list(HEALTH), "leaves": [{"leaf": leaf, "nodes": nodes} for leaf, nodes in leaves.items()]}
