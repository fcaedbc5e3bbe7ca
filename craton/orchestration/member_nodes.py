"""How many nodes a scheduler job needs for a run with members, and which of them each member gets.

The nodes of the job are in two zones. The first has the nodes of the owner; members that must be done before its ranks
start use them too, one after the other. The second has the nodes of members that run beside the owner. A run that only
reports on its members needs no nodes of its own: all members are in the second zone, and it shares the first node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from craton.telemetry.members import MemberSpec, MembersSpec


@dataclass(frozen=True)
class NodeZones:
    """Sizes of the two zones, in nodes."""

    of_owner: int
    beside: int

    @property
    def total(self) -> int:
        return self.of_owner + self.beside


def num_shares(spec: MembersSpec) -> int:
    """Return how many members may run at a time."""
    startable = sum(not member.is_kept for member in spec.members)
    return max(1, min(spec.parallel or startable, startable))


def node_zones(spec: MembersSpec, owner_nodes: int) -> NodeZones:
    """Return the zones of a run that needs `owner_nodes` itself: room for the largest members that run at a time."""
    if spec.purpose == "sweep":
        return NodeZones(0, max(1, owner_nodes, _peak(spec, spec.members)))
    before = [member for member in spec.members if _runs_before_owner(member)]
    beside = [member for member in spec.members if not _runs_before_owner(member)]
    return NodeZones(max(owner_nodes, _peak(spec, before)), _peak(spec, beside))


def choose_hosts(
    spec: MembersSpec,
    name: str,
    owner_nodes: int,
    hosts: Sequence[str],
    taken: Collection[str],
    before: Collection[str] = (),
) -> list[str]:
    """Return the hosts of a member, those that it had `before` first; fewer than it needs if others have `taken` them.
    `hosts` are all hosts of the job, those of the owner first."""
    member = spec.member(name)
    assert member is not None, name
    border = node_zones(spec, owner_nodes).of_owner
    zone = hosts[:border] if spec.purpose != "sweep" and _runs_before_owner(member) else hosts[border:]
    free = [host for host in zone if host not in taken]
    return sorted(free, key=lambda host: host not in before)[: member.nodes]


def _runs_before_owner(member: MemberSpec) -> bool:
    return member.gate == "done"


def _peak(spec: MembersSpec, members: Iterable[MemberSpec]) -> int:
    sizes = sorted((member.nodes for member in members if not member.is_kept), reverse=True)
    return sum(sizes[: num_shares(spec)])
