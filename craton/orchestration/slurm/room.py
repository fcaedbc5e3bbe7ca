"""The nodes that a pending job could use: free ones, idle ones kept for others, and when the rest become free. Pure.

An idle node is not always free: a reservation may hold it, or Slurm may have planned it for a job in front. A node that
several jobs share is free when the last of them ends; a node whose job has no time limit never is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from craton.orchestration.slurm.records import JobRecord, NodeRecord, hosts_of
from craton.orchestration.slurm.tools import SlurmState

FOREVER = float("inf")


@dataclass(frozen=True)
class NodeRelease:
    """When a node is released, and by which job or reservation."""

    moment: float
    by: str  # `job 812`, `the reservation maint`


@dataclass(frozen=True)
class Room:
    """The nodes that a job could run on, in their current state."""

    free: frozenset[str]
    busy: dict[str, NodeRelease]  # all others
    kept: dict[str, list[str]]  # idle nodes by what they are kept for

    @property
    def nodes(self) -> frozenset[str]:
        return self.free | set(self.busy)

    def earliest(
        self, needed: int, places: Iterable[Iterable[str]] | None = None, most: int = 1, together: int = 1
    ) -> NodeRelease | None:
        """Return the release that makes room for `needed` nodes in at most `most` of these places, in each a multiple
        of `together`; None if they are already free, or if no known release suffices."""
        groups = [set(place) & self.nodes for place in places] if places is not None else [set(self.nodes)]
        counts = [len(group & self.free) for group in groups]
        if most_nodes(counts, most, together) >= needed:
            return None
        for name, release in sorted(self.busy.items(), key=lambda item: (item[1].moment, item[1].by)):
            if release.moment == FOREVER:
                return None
            counts = [count + (name in group) for count, group in zip(counts, groups, strict=True)]
            if most_nodes(counts, most, together) >= needed:
                return release
        return None


def room_for(job: JobRecord, cluster: SlurmState, now: float) -> Room:
    free: set[str] = set()
    busy: dict[str, NodeRelease] = {}
    kept: dict[str, list[str]] = {}
    for node in usable_nodes(job, cluster):
        holds = [NodeRelease(item.end or FOREVER, f"job {item.id}") for item in cluster.jobs_on.get(node.name, ())]
        if not node.is_free and not holds:  # used by a job that this user may not see
            holds.append(NodeRelease(FOREVER, ""))
        others = _kept(node, job, cluster, now)
        if node.is_free and others:
            kept.setdefault(min(others, key=lambda element: element.moment).by, []).append(node.name)
        if holds or others:
            busy[node.name] = max([*holds, *others], key=lambda entry: (entry.moment, entry.by))
        else:
            free.add(node.name)
    return Room(frozenset(free), busy, kept)


def most_nodes(counts: Iterable[int], most: int, together: int = 1) -> int:
    """Return the maximum number of nodes in at most `most` places, in each a multiple of `together`."""
    return sum(sorted((count - count % together for count in counts), reverse=True)[:most])


def usable_nodes(job: JobRecord, cluster: SlurmState) -> list[NodeRecord]:
    """Return the nodes of its partition with its features, in its reservation, not excluded and not away."""
    excluded, required = set(hosts_of(job.excluded)), set(hosts_of(job.required))
    own = next(
        (
            reservation
            for reservation in cluster.reservations
            if job.reservation and reservation.name == job.reservation
        ),
        None,
    )
    within = set(hosts_of(own.nodes)) if own else set()
    wanted = [word for word in re.split(r"[&,]", job.features) if re.fullmatch(r"[A-Za-z0-9_.=-]+", word)]
    return [
        node
        for node in in_partition(job, cluster)
        if not node.is_away
        and node.name not in excluded
        and (not within or node.name in within)
        and (len(required) < max(1, job.num_nodes) or node.name in required)
        and all(item in node.features for item in wanted)
    ]


def in_partition(job: JobRecord, cluster: SlurmState) -> list[NodeRecord]:
    """Return the nodes of the job's partitions, or of all partitions."""
    partitions = set(job.partition.split(",")) - {""}
    return [node for node in cluster.nodes if not partitions or partitions & set(node.partitions)]


def _kept(node: NodeRecord, job: JobRecord, cluster: SlurmState, now: float) -> list[NodeRelease]:
    """Return reservations and planned jobs that hold the node while the job would need it."""
    end = now + job.time_limit_seconds if job.time_limit_seconds is not None else FOREVER
    reserved = [
        NodeRelease(item.end or FOREVER, f"the reservation {item.name}")
        for item in cluster.reservations_on.get(node.name, ())
        if item.name != job.reservation and (item.end or FOREVER) > now and (item.start or 0.0) < end
    ]
    if "RESERVED" in node.states and not reserved and not job.reservation:
        reserved.append(NodeRelease(FOREVER, "a reservation"))
    return [*reserved, *_planned(node, job, cluster, end)]


def _planned(node: NodeRecord, job: JobRecord, cluster: SlurmState, end: float) -> list[NodeRelease]:
    """Return the job that the node is planned for, unless it is this one or starts only after this one ends."""
    if "PLANNED" not in node.states:
        return []
    first = cluster.planned_on.get(node.name)
    if first is None:
        return [NodeRelease(FOREVER, "another job")]
    if first.id == job.id or (first.start or 0.0) >= end:
        return []
    return [NodeRelease(first.end or FOREVER, f"job {first.id}")]
