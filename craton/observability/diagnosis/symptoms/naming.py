"""Names of ranks and nodes for the sentences of symptoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from craton.formatting import counted
from craton.observability.diagnosis.similar_text import without_numbers
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank


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


def odd_by_output(snapshot: Snapshot) -> list[SnapshotRank]:
    """Return the few ranks of a command whose last line of output differs from that of most others, numbers aside."""
    by_line: dict[str, list[SnapshotRank]] = {}
    for rank in snapshot.ranks:
        by_line.setdefault(without_numbers(rank.last_line), []).append(rank)
    usual = max(by_line.values(), key=len, default=[])
    # A rank whose steps are read is not odd: in many commands it alone prints them.
    odd = [rank for rank in snapshot.ranks if rank not in usual and rank.last_line and not rank.step]
    return odd if 0 < 3 * len(odd) <= len(snapshot.ranks) and usual[0].last_line else []


def progress_age(rank: SnapshotRank) -> float:
    return rank.progress_age_seconds or 0.0
