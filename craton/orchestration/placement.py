"""Assign ranks to allocated nodes by topology, and compare the placement with the requested one.

Ranks are numbered node after node (pp · replicate · fsdp · cp · tp, tp innermost), so the order of nodes decides which
groups of ranks share an NVLink domain, a leaf or a spine. `order_nodes` finds an order that keeps as many groups
together as possible; `audit` reports the result and its predicted cost. Both are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from craton.formatting import counted, dollars, duration, percent
from craton.infrastructure import Cluster
from craton.infrastructure.topology import level_names, natural
from craton.job import Job, Placement
from craton.job.layout import Layout
from craton.planning import PlanError, placed_step_seconds

Address = str | Sequence[str]  # Slurm's `spine.leaf1.g1`, or the switches of a node, broadest first
_CLOSE = ("node", "leaf")  # within these levels no group crosses a leaf


@dataclass(frozen=True)
class Crossing:
    """Number of groups of one layout dimension that cross a network boundary."""

    dimension: str  # tp, cp, ep, fsdp, replicate; pp: pairs of ranks in neighbouring stages
    border: str  # leaf, or the NVLink domain
    crossing: int
    groups: int


@dataclass(frozen=True)
class Audit:
    """The requested placement, the actual one, and the cost of the difference."""

    asked: str  # a level, or "" if the job requests none
    held: bool | None  # None: nothing was requested, or the topology is unknown
    nodes: dict[str, str]  # in rank order: node → its leaf
    spread: dict[str, dict[str, int]]  # level → switch → how many of the nodes
    crossings: list[Crossing]
    asked_step_seconds: float | None = None
    got_step_seconds: float | None = None
    dollars_per_day: float | None = None  # cost of the difference
    note: str = ""  # why there is no price, or what it omits

    @property
    def slower(self) -> float:
        """Share of the step time lost by the actual placement."""
        if not self.asked_step_seconds or not self.got_step_seconds:
            return 0.0
        return 1.0 - self.asked_step_seconds / self.got_step_seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slower": self.slower, "sentences": self.sentences()}

    def sentences(self) -> list[str]:
        """Describe the placement, the verdict first."""
        leaves = ", ".join(f"{name} x {count}" for name, count in self.spread.get("leaf", {}).items())
        allocation = (
            f"{counted(len(self.nodes), 'node')} on {leaves}"
            if leaves
            else f"{counted(len(self.nodes), 'node')}, their leaves unknown"
        )
        if self.held is None:
            lines = [
                f"got {allocation}" + (f"; requested one {self.asked}, which cannot be checked" if self.asked else "")
            ]
        else:
            lines = [f"requested one {self.asked}, got {allocation}: {'satisfied' if self.held else 'not satisfied'}"]
        for crossing in self.crossings:
            if crossing.crossing:
                groups = "sends between stages" if crossing.dimension == "pp" else f"{crossing.dimension} groups"
                lines.append(f"{crossing.crossing} of {crossing.groups} {groups} cross a {crossing.border}")
        if self.asked_step_seconds and self.got_step_seconds:
            if self.got_step_seconds > self.asked_step_seconds * 1.0005:
                money = f", {dollars(self.dollars_per_day)} a day" if self.dollars_per_day else ""
                lines.append(
                    f"predicted cost: {percent(self.slower)} of every step "
                    f"({duration(self.got_step_seconds)} instead of {duration(self.asked_step_seconds)}{money})"
                )
            else:
                lines.append("predicted cost: none")
        return lines + ([self.note] if self.note else [])


def order_nodes(addresses: Mapping[str, Address], layout: Layout | None = None, ranks_per_node: int = 1) -> list[str]:
    """Return the nodes in rank order.

    Blocks of nodes that hold one group of the layout each (tensor, context, expert, shard, replica, stage, each made of
    whole blocks of the previous one) are built from the smallest up, from nodes that share the longest address prefix.
    So every level of the network keeps the maximum number of whole blocks: n nodes of a leaf hold n // b blocks of b.
    Nodes that fill no block come last: a run with spares leaves them idle.
    """
    pieces = [([node], _path(node, address)) for node, address in addresses.items()]
    pieces.sort(key=lambda piece: ([natural(name) for name in piece[1]], natural(piece[0][0])))
    rest: list[_Piece] = []
    size = 1
    for block in _block_nodes(layout, ranks_per_node):
        pieces, left = _join(pieces, block // size)
        rest = left + rest
        size = block
    return [node for nodes, _ in pieces + rest for node in nodes]


def audit(
    addresses: Mapping[str, Address],
    asked: Placement | None = None,
    layout: Layout | None = None,
    ranks_per_node: int = 1,
    *,
    levels: Sequence[str] = (),
    job: Job | None = None,
    cluster: Cluster | None = None,
) -> Audit:
    """Compare the requested placement with the allocated nodes; `addresses` is in rank order.

    `levels` names the entries of an address, broadest first (default: …, spine, leaf). With `job` and `cluster` the
    planner predicts the cost: the requested placement against groups that cross leaves as they do now.
    """
    paths = {node: _path(node, address) for node, address in addresses.items()}
    depth = max((len(path) for path in paths.values()), default=0)
    names = tuple(levels)[:depth] if levels else level_names(depth)
    leaf_at = names.index("leaf") if "leaf" in names else -1
    domains = {node: ".".join(path) if "domain" in names else node for node, path in paths.items()}
    spread = {
        level: dict(Counter(path[at] if at < len(path) else "" for path in paths.values()))
        for at, level in enumerate(names)
    }
    is_known = leaf_at >= 0 and all(len(path) == depth for path in paths.values())
    leaves = {node: ".".join(path[: leaf_at + 1]) for node, path in paths.items()} if is_known else {}
    within = asked.within if asked else ""
    result = Audit(
        asked=within,
        held=_held(within, names, spread, len(paths)) if is_known else None,
        nodes={node: path[leaf_at] if is_known else "" for node, path in paths.items()},
        spread=spread if is_known else {},
        crossings=_crossings(layout, ranks_per_node, list(leaves.values()), list(domains.values())) if is_known else [],
    )
    if job is None or cluster is None or layout is None or not is_known:
        return result
    return _priced(result, job, cluster, layout, list(leaves.values()), ranks_per_node)


def layout_of(plan: Mapping[str, Any]) -> Layout | None:
    """Return the layout in plan.json, by which nodes are ordered."""
    try:
        return Layout(**plan["layout"])
    except (KeyError, TypeError, ValueError):
        return None


_Piece = tuple[list[str], tuple[str, ...]]  # nodes in order, and the part of the address they share


def _path(node: str, address: Address) -> tuple[str, ...]:
    """Return the switches; Slurm's address ends with the node itself."""
    if not isinstance(address, str):
        return tuple(address)
    return tuple(part for part in address.removesuffix(node).split(".") if part)


def _block_nodes(layout: Layout | None, ranks_per_node: int) -> list[int]:
    """Return the sizes in nodes of blocks that hold one group of the layout, ascending; each divides the next."""
    if layout is None:
        return []
    result: list[int] = []
    for span in sorted(span for _, span, _ in _groups(layout)):
        nodes, inner = span // ranks_per_node, result[-1] if result else 1
        if span % ranks_per_node == 0 and nodes > inner and nodes % inner == 0:
            result.append(nodes)
    return result


def _groups(layout: Layout) -> list[tuple[str, int, int]]:
    """Return (dimension, ranks that a group spans, stride between its ranks), without dimensions of size 1."""
    inner = layout.cp * layout.tp
    shards, copies = inner * layout.fsdp, inner * layout.fsdp * layout.replicate
    dimensions = [
        ("tp", layout.tp, layout.tp, 1),
        ("cp", layout.cp, inner, layout.tp),
        ("ep", layout.ep, layout.ep * layout.tp, layout.tp),
        ("fsdp", layout.fsdp, shards, inner),
        ("replicate", layout.replicate, copies, shards),
        ("pp", layout.pp, layout.world, copies),
    ]
    return [(name, span, stride) for name, size, span, stride in dimensions if size > 1]


def _join(pieces: list[_Piece], count: int) -> tuple[list[_Piece], list[_Piece]]:
    """Join `count` pieces at a time, those with the longest shared prefix first; return blocks and the rest."""
    depth = max((len(path) for _, path in pieces), default=0)
    whole: list[_Piece] = []
    for shared in range(depth, -1, -1):
        groups: dict[tuple[str, ...], list[_Piece]] = {}
        for piece in pieces:
            if len(piece[1]) >= shared:
                groups.setdefault(piece[1][:shared], []).append(piece)
        taken: list[_Piece] = []
        for path, group in groups.items():
            # longest shared prefix, then the fullest switches: few switches per block, singles fill gaps
            sizes = Counter(piece[1] for piece in group)
            group.sort(key=lambda piece: (-len(piece[1]), -sizes[piece[1]], [natural(name) for name in piece[1]]))
            for start in range(0, len(group) - count + 1, count):
                block = group[start : start + count]
                taken += block
                same = len({piece[1] for piece in block}) == 1
                whole.append(([node for nodes, _ in block for node in nodes], block[0][1] if same else path))
        used = {id(piece) for piece in taken}
        pieces = [piece for piece in pieces if id(piece) not in used]
    # longest shared prefix first: a run that needs fewer blocks gets the best of them
    whole.sort(key=lambda piece: (-len(piece[1]), [natural(name) for name in piece[1]]))
    return whole, pieces


def _held(within: str, names: Sequence[str], spread: Mapping[str, Mapping[str, int]], num_nodes: int) -> bool | None:
    if not within:
        return None
    if within == "node":
        return num_nodes == 1
    if within in names:
        return len(spread[within]) == 1
    return True if within == "zone" and names and len(spread[names[0]]) == 1 else None


def _crossings(
    layout: Layout | None, ranks_per_node: int, leaves: Sequence[str], domains: Sequence[str]
) -> list[Crossing]:
    """Count crossing groups over the ranks of the layout; nodes beyond it are spares."""
    if layout is None:
        return []
    world = min(layout.world, len(leaves) * ranks_per_node)
    result = []
    for name, span, stride in _groups(layout):
        for border, places in (("leaf", leaves), ("NVLink domain", domains)):
            if border != "leaf" and name not in ("tp", "ep"):
                continue
            at = [places[rank // ranks_per_node] for rank in range(world)]
            if name == "pp":
                pairs = [(at[rank], at[rank + stride]) for rank in range(world - stride)]
                result.append(Crossing(name, border, sum(one != other for one, other in pairs), len(pairs)))
                continue
            starts = [block + offset for block in range(0, world, span) for offset in range(stride)]
            groups = [set(at[start : start - start % span + span : stride]) for start in starts]
            result.append(Crossing(name, border, sum(len(group) > 1 for group in groups), len(groups)))
    return result


def _whole_nodes(layout: Layout, ranks_per_node: int, leaves: Sequence[str]) -> int:
    """Return the largest block size of which no block crosses a leaf; 0 if all nodes are on one leaf."""
    used = leaves[: max(1, layout.world // ranks_per_node)]
    if len(set(used)) == 1:
        return 0
    whole = 1
    for block in _block_nodes(layout, ranks_per_node):
        if all(len(set(used[start : start + block])) == 1 for start in range(0, len(used), block)):
            whole = block
    return whole


def _priced(
    audited: Audit, job: Job, cluster: Cluster, layout: Layout, leaves: Sequence[str], ranks_per_node: int
) -> Audit:
    asked_leaf = 0 if audited.asked in _CLOSE else cluster.leaf_nodes
    try:
        asked = placed_step_seconds(job, cluster, layout, asked_leaf)
        placed = placed_step_seconds(job, cluster, layout, _whole_nodes(layout, ranks_per_node, leaves))
    except PlanError as error:
        return Audit(**{**vars(audited), "note": f"no price: {error}"})
    note = ""
    if len(set(leaves)) > 1 and cluster.spine_oversubscription == 1.0:
        note = (
            "the cluster file has no oversubscription between leaves (levels: {leaf: {oversubscription: …}}), so "
            "crossing them is assumed to be free"
        )
    dollars = None
    if cluster.price and placed > asked:
        dollars = (1.0 - asked / placed) * cluster.price.dollars_per_hour * cluster.num_nodes * 24.0
    return Audit(
        **{
            **vars(audited),
            "asked_step_seconds": asked,
            "got_step_seconds": placed,
            "dollars_per_day": dollars,
            "note": note,
        }
    )
