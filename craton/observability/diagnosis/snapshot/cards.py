"""Map the ranks of a run to the GPUs of its nodes.

A node may run several jobs. Then the n-th rank is not on the n-th GPU, and a faulty GPU may belong to another job. GPUs
that the run does not use are left out of its snapshot; a rank whose GPU is not known has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from craton.observability.diagnosis.snapshot.model import Snapshot, SnapshotNode, SnapshotRank


@dataclass(frozen=True)
class CardOccupant:
    """A process of a rank on a GPU, as the node exporter reports it."""

    node: str  # of the run
    card: int
    run: str
    rank: int | None


def with_visible_cards(snapshot: Snapshot, visible: Mapping[str, str]) -> Snapshot:
    """Assign GPUs by `visible`: node → its GPUs in rank order, by index or UUID, as in CUDA_VISIBLE_DEVICES. On a node
    that is not listed and has more GPUs than the run needs, the GPUs of its ranks are not known."""
    nodes, places = [], dict[str, dict[int, int] | None]()
    for node in snapshot.nodes:
        wanted = visible.get(node.name, "").split(",")[: node.expected_gpus]
        own = {
            place: gpu.index
            for place, name in enumerate(wanted)
            for gpu in node.gpus
            if name.strip() in (gpu.uuid or "-", str(gpu.index))
        }
        if own:
            places[node.name] = own
            node = replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu.index in own.values()))
        elif len(node.gpus) > (node.expected_gpus or len(node.gpus)) and _are_guessed(snapshot, node):
            places[node.name] = None
        nodes.append(node)
    per_node = max(1, snapshot.run.ranks_per_node)

    def placed(rank: SnapshotRank) -> SnapshotRank:
        if rank.node not in places:
            return rank
        own = places[rank.node]
        return replace(rank, gpu=None if own is None else own.get(rank.rank % per_node))

    return replace(snapshot, nodes=tuple(nodes), ranks=tuple(map(placed, snapshot.ranks)))


def with_occupants(snapshot: Snapshot, occupants: Iterable[CardOccupant]) -> Snapshot:
    """Assign each rank the GPU on which its process has memory; drop GPUs that only other jobs use."""
    listed = list(occupants)
    mine: dict[tuple[str, int], int] = {}  # (node, card) → rank
    for entry in listed:
        rank = snapshot.rank(entry.rank) if entry.run == snapshot.run.name and entry.rank is not None else None
        if rank is not None and rank.node == entry.node:
            mine[entry.node, entry.card] = rank.rank
    held = {(item.node, item.card) for item in listed}
    card_of = {rank: card for (_, card), rank in mine.items()}

    def without_others(node: SnapshotNode) -> SnapshotNode:
        gpus = [gpu for gpu in node.gpus if (node.name, gpu.index) in mine or (node.name, gpu.index) not in held]
        own = [gpu for gpu in gpus if (node.name, gpu.index) in mine]
        # A GPU without a process may belong to a rank that has ended.
        return replace(node, gpus=tuple(own if len(own) >= (node.expected_gpus or len(gpus) + 1) else gpus))

    def placed(rank: SnapshotRank) -> SnapshotRank:
        if rank.rank in card_of:
            return replace(rank, gpu=card_of[rank.rank])
        is_taken = rank.gpu is not None and (rank.node, rank.gpu) in held
        return replace(rank, gpu=None) if is_taken else rank

    nodes = tuple(without_others(node) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes, ranks=tuple(map(placed, snapshot.ranks)))


def _are_guessed(snapshot: Snapshot, node: SnapshotNode) -> bool:
    """Return whether the GPUs of its ranks are only guessed from their local rank."""
    per_node = max(1, snapshot.run.ranks_per_node)
    return all(rank.gpu == rank.rank % per_node for rank in snapshot.ranks if rank.node == node.name)
