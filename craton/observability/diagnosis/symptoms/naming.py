"""Names of ranks and nodes for the sentences of symptoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from craton.formatting import counted
from craton.observability.diagnosis.snapshot import SnapshotRank


def who(ranks: Sequence[SnapshotRank]) -> str:
    nodes = nodes_of(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} on {ranks[0].node}"
    if len(nodes) == 1:
        return f"{counted(len(ranks), 'rank')} on {nodes[0]}"
    return f"{len(ranks)} ranks on {', '.join(nodes[:3])}" + (
        f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else ""
    )


def nodes_of(ranks: Iterable[SnapshotRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in ranks))


def progress_age(rank: SnapshotRank) -> float:
    return rank.progress_age_seconds or 0.0
