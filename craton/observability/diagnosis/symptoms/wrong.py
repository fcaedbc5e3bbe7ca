"""Wrong results: a rank that computes other values, and losses that are not finite, diverge or spike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from craton.observability.diagnosis.snapshot import Snapshot, SnapshotRank
from craton.observability.diagnosis.symptoms.naming import nodes_of
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Symptom

NEWEST_LOSSES, MIN_LOSSES = 5, 24


def find_wrong(snapshot: Snapshot) -> list[Symptom]:
    result = []
    ranks = _odd_ranks(snapshot)
    if ranks:
        names = ", ".join(str(rank.rank) for rank in ranks)
        text = f"computes different values on rank {names} than on the other ranks"
        result.append(
            Symptom(
                "wrong",
                text,
                tuple(_oddity(rank) for rank in ranks),
                tuple(rank.rank for rank in ranks),
                nodes_of(ranks),
                lost_share=1.0,
                sign="odd_rank",
            )
        )
    losses = [value for _, value in snapshot.series.loss]
    norms = [value for _, value in snapshot.series.gradient_norm]
    if _ends_badly(losses) or _ends_badly(norms):
        quantity = "loss" if _ends_badly(losses) else "gradient norm"
        series = snapshot.series.loss if quantity == "loss" else snapshot.series.gradient_norm
        since = next((step for step, value in series if not math.isfinite(value)), None)
        evidence = (f"the {quantity} has been NaN or Inf since step {since}",)
        text = f"has a {quantity} that is NaN or Inf"
        result.append(Symptom("wrong", text, evidence, lost_share=1.0, sign="not_a_number"))
    elif (left := _left_its_way(losses)) is not None:
        sign, text = left
        # Training may recover from a spike; after NaN or divergence it is lost.
        lost = 0.0 if sign == "loss_spike" else 1.0
        result.append(Symptom("wrong", text, (f"latest losses: {last_values(losses)}",), lost_share=lost, sign=sign))
    return result


def _odd_ranks(snapshot: Snapshot) -> list[SnapshotRank]:
    """Return ranks whose state differs from its replicas, or whose gradient norm is far off its usual value."""
    differ = [rank for rank in snapshot.ranks if rank.differs_from_copies]
    if differ:
        return differ if 2 * len(differ) <= len(snapshot.ranks) or len(differ) == 1 else []
    measured = [rank for rank in snapshot.ranks if rank.gradient_norm is not None]
    broken = [rank for rank in measured if not math.isfinite(rank.gradient_norm or 0.0)]
    if broken and 2 * len(broken) < len(measured):
        return broken
    ratios = {
        rank.rank: (rank.gradient_norm or 0.0) / rank.gradient_norm_usual
        for rank in measured
        if rank.gradient_norm_usual and math.isfinite(rank.gradient_norm or 0.0)
    }
    if len(ratios) < 3:
        return []
    usual = statistics.median(ratios.values())
    limit = threshold("gradient_ratio")
    odd = [rank for rank in measured if usual > 0 and ratios.get(rank.rank, usual) / usual > limit]
    return odd if 2 * len(odd) < len(measured) else []


def _oddity(rank: SnapshotRank) -> str:
    if rank.differs_from_copies:
        return f"the state of rank {rank.rank} on {rank.node} has a different checksum than its replicas on other ranks"
    norm, usual = rank.gradient_norm or 0.0, rank.gradient_norm_usual
    against = f", usually {usual:.3g}" if usual else ""
    return f"rank {rank.rank} on {rank.node} has a gradient norm of {norm:.3g}{against}; the other ranks are normal"


def _ends_badly(values: Sequence[float]) -> bool:
    """Return whether most of the newest values are not finite: one bad step that was skipped is not a fault."""
    newest = values[-NEWEST_LOSSES:]
    return bool(newest) and 2 * sum(not math.isfinite(value) for value in newest) > len(newest)


def _left_its_way(values: Sequence[float]) -> tuple[str, str] | None:
    """Return (sign, sentence) if the losses grow."""
    losses = [value for value in values if math.isfinite(value)]
    if len(losses) < MIN_LOSSES:
        return None
    newest = statistics.median(losses[-NEWEST_LOSSES:])
    quarter = len(losses) // 4
    parts = [losses[first : first + quarter] for first in range(0, 4 * quarter, quarter)]
    best = min(parts[:-1], key=statistics.median)
    level = statistics.median(best)
    spread = statistics.median(abs(value - level) for value in best)
    far = max(threshold("spike_spreads") * spread, 0.05)
    last = statistics.median(parts[-1])
    if last > level * threshold("diverged_ratio") and last - level > far and newest >= last * 0.98:
        return "diverged", f"diverges: its loss rose from {level:.3g} to {newest:.3g}"
    before = statistics.median(losses[-quarter - NEWEST_LOSSES : -NEWEST_LOSSES])
    if newest > before * threshold("spike_ratio") and newest - before > far:
        return "loss_spike", f"has a loss spike from {before:.3g} to {newest:.3g}"
    return None


def last_values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[-4:])
