"""Whom the others wait for, by the one comparison there is: that of `craton why` (`diagnosis.straggler_of`).

Where there is a verdict, what it was made from names the rank, so that the page never says anything else beside it.
Before there is one, which takes its time at a wide run, the same comparison is made of what the ranks told last.
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
    """The verdict's own; before there is one, or where the run cannot be examined, that of the table."""
    if state not in MOVING:
        return None
    if verdict is not None and verdict.condition != "unknown":
        return verdict.late
    return late_of(straggler_of(table_snapshot(run, member, table)))


def finding(table: RankTable, late: Late | None, state: str) -> str:
    """One sentence above the picture."""
    if not len(table):
        return "No rank has told of a step yet"
    if late is not None:
        return f"{late.sentence[:1].upper()}{late.sentence[1:]}: {formatting.percent(late.share)} of every step is lost"
    if len(table) == 1:
        return "The only rank has nobody to be compared with"
    if state not in MOVING:
        return "What the ranks did last; they are compared while the run moves"
    if min(table.num_lines) < KEPT_LINES:
        return f"Ranks are compared when each has told of {KEPT_LINES} steps"
    return "In their last steps no rank held the others up"


def table_snapshot(run: RunDirectory, member: NodeMember, table: RankTable) -> Snapshot:
    """What the ranks told last, for the examination; nothing else is known in it."""
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
    """Those that have told enough to be compared."""
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
    """Over the second axis, of what is known; NaN where nothing is. Quicker than numpy's own of short rows."""
    ordered = np.sort(values, axis=1)  # NaN comes last
    counts = (~np.isnan(values)).sum(axis=1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(counts - 1, 0) // 2, axis=1)
    high = np.take_along_axis(ordered, np.minimum(counts // 2, values.shape[1] - 1), axis=1)
    result: NDArray[np.float64] = ((low + high) / 2.0)[:, 0]
    return result
