"""Find stragglers with the comparison of `craton why` (`diagnosis.straggler_of`).

If there is a verdict, its own data names the rank, so that page and verdict never disagree. Until then, which takes
long for a wide run, the same comparison uses the last reported steps of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from craton import formatting
from craton.observability.diagnosis import straggler_of
from craton.observability.diagnosis.snapshot import RunFacts, Snapshot, SnapshotRank
from craton.observability.web.readers import KEPT_LINES, MEAN_LINES, PHASES, NodeMember, RankTable
from craton.observability.web.sources import CachedVerdict, Late, late_of
from craton.orchestration import read_submission
from craton.orchestration.watching import MOVING
from craton.telemetry import RunDirectory

TIMES = (*PHASES, "step")  # the first columns of a table


def straggler(
    run: RunDirectory, state: str, member: NodeMember, table: RankTable, verdict: CachedVerdict | None
) -> Late | None:
    """Return the verdict's straggler; without a verdict, or when diagnosis failed, that of the table."""
    if state not in MOVING:
        return None
    if verdict is not None and verdict.condition != "unknown":
        return verdict.late
    return late_of(straggler_of(table_snapshot(run, member, table)))


def finding(table: RankTable, late: Late | None, state: str) -> str:
    """Return the sentence above the heat map."""
    if not len(table):
        return "No rank has reported a step yet"
    if late is not None:
        return f"{late.sentence[:1].upper()}{late.sentence[1:]}: {formatting.percent(late.share)} of every step is lost"
    if len(table) == 1:
        return "Only one rank: there is nothing to compare it with"
    if state not in MOVING:
        return "Last steps of the ranks; they are compared only while the run is active"
    if min(table.num_lines) < KEPT_LINES:
        return f"Ranks are compared once each has reported {KEPT_LINES} steps"
    return "No straggler in the last steps"


def table_snapshot(run: RunDirectory, member: NodeMember, table: RankTable) -> Snapshot:
    """Return a snapshot that contains only the last reported steps of the ranks."""
    facts = RunFacts(
        name=run.name,
        on=read_submission(run).on,
        nodes=tuple(member.nodes),
        ranks_per_node=member.ranks_per_node,
        leaves={node: leaf for node, leaf in member.leaves.items() if leaf},
        layout={"pp": member.num_stages},
        is_accelerated=member.is_accelerated,
        generation=member.generation,
    )
    return Snapshot(time.time(), facts, ranks=tuple(_ranks(table)))


def _ranks(table: RankTable) -> Iterator[SnapshotRank]:
    """Yield the ranks with enough steps to compare."""
    chosen = [index for index, num_lines in enumerate(table.num_lines) if num_lines == KEPT_LINES]
    seconds = table.lines[chosen, :, : len(TIMES)]  # [chosen, MEAN_LINES, TIMES]
    works = seconds[:, :, TIMES.index("step")] - seconds[:, :, TIMES.index("communication")]
    deviations = _medians(np.abs(works - _medians(works)[:, None])).tolist()
    for index, medians, deviation in zip(chosen, _medians(seconds).tolist(), deviations, strict=True):
        yield SnapshotRank(
            table.ranks[index],
            table.nodes[index],
            recent={name: value for name, value in zip(TIMES, medians, strict=True) if value == value},
            num_recent=MEAN_LINES,
            work_deviation_seconds=deviation if deviation == deviation else None,
        )


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return medians over the second axis, ignoring NaN; NaN without values. Faster than numpy's on short rows."""
    ordered = np.sort(values, axis=1)  # NaN comes last
    counts = (~np.isnan(values)).sum(axis=1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(counts - 1, 0) // 2, axis=1)
    high = np.take_along_axis(ordered, np.minimum(counts // 2, values.shape[1] - 1), axis=1)
    result: NDArray[np.float64] = ((low + high) / 2.0)[:, 0]
    return result
