"""Peak instants of pipeline ranks that train with craton/ml: tensors of one chunk times the loads of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from craton.job.layout import Schedule
from craton.planning.memory.schedule_loads import (
    AFTER_BACKWARD,
    AFTER_WEIGHT,
    BACKWARD,
    FORWARD,
    WEIGHT,
    PipelineRank,
    pipeline_loads,
)

Array = NDArray[np.float64]


class MomentBytes(NamedTuple):
    """Bytes that are alive at one moment."""

    gradients: Array
    activations: Array
    in_work: Array


class ChunkBytes(NamedTuple):
    """Bytes of one chunk's pass on a pipeline rank, and of the tensors alive beside it: [ranks]."""

    layers: Array
    kept: Array
    late: Array  # until its weight gradients are computed
    in_work: Array  # of a layer
    stream: Array
    gradients: Array  # of the layers, as they are computed
    group: Array  # of its largest FSDP group
    tables: Array  # of embedding or head
    head: Array  # computed with the loss
    landed: Array  # of all, reduced
    widened: Array  # width factor of accumulated gradients
    has_late: Array  # 1: weight gradients are computed later


def pipeline_moments(
    ranks: Sequence[tuple[Schedule, int, int, int, int]], chunk: ChunkBytes
) -> tuple[MomentBytes, MomentBytes, MomentBytes]:
    """Return the peaks of forward passes, of backward layers, and of gradient accumulation: [ranks]. A rank is given by
    the fields of `PipelineRank`."""
    positions = {rank: position for position, rank in enumerate(dict.fromkeys(ranks))}
    position = np.array([positions[rank] for rank in ranks])
    loads = pipeline_loads([PipelineRank(*rank) for rank in positions])
    counts = np.bincount(loads.owner, minlength=len(positions))
    num_loads = counts[position]
    starts = np.cumsum(num_loads) - num_loads
    of = np.repeat(np.arange(len(ranks)), num_loads)  # the rank of each load
    source = np.arange(len(of)) - starts[of] + (np.cumsum(counts) - counts)[position][of]
    _, _, instant, passes, late, summed, tables, has_tables, starts_sum, reduces = (column[source] for column in loads)
    own = ChunkBytes(*(column[of] for column in chunk))

    sums = own.widened * (summed * own.gradients + tables * own.tables)
    new_sums = starts_sum * (own.widened * own.gradients)
    activations = passes * own.kept + late * own.late
    head = has_tables * own.head
    nothing = np.zeros_like(sums)

    forward = MomentBytes(sums, activations, nothing)
    # The chunk's first layer is the last in the backward pass.
    layer = 1.0 / own.layers
    is_after = instant == AFTER_BACKWARD
    others = new_sums * (1.0 - layer)
    kept = layer * (own.kept - own.has_late * own.late)
    is_weight = instant == WEIGHT
    first = MomentBytes(
        np.where(is_weight, sums, np.where(is_after, sums + others + head, sums + head)),
        np.where(is_after, activations + kept, activations),
        np.where(is_weight, 0.0, own.in_work),
    )
    # Gradients of the tables, as they are computed; of a group of layers, or of all before one is added.
    at_end = own.tables * (1.0 + np.where(tables, 0.0, own.widened))
    gives = starts_sum | reduces
    taken = np.where((instant == AFTER_WEIGHT) & (gives == 0), own.gradients, own.group)
    reducing = (1.0 + own.widened) * own.group + np.where(summed, 0.0, own.landed)
    taken = np.where(reduces, reducing, taken)
    of_tables = MomentBytes(sums + new_sums + at_end, activations, own.stream)
    later = MomentBytes(sums + new_sums + taken, activations, own.stream)
    both = MomentBytes(*(np.stack(pair, axis=1).ravel() for pair in zip(of_tables, later, strict=True)))
    happens = np.stack([is_after & (has_tables > 0), is_after | (instant == AFTER_WEIGHT)], axis=1).ravel()
    return (
        _largest(forward, instant == FORWARD, starts),
        _largest(first, (instant == BACKWARD) | is_weight | is_after, starts),
        _largest(both, happens, 2 * starts),
    )


def _largest(moments: MomentBytes, happens: NDArray[np.bool_], starts: NDArray[np.int64]) -> MomentBytes:
    """Return the first largest moment of every segment."""
    total = np.where(happens, moments.gradients + moments.activations + moments.in_work, -np.inf)
    lengths = np.diff(starts, append=len(total))
    is_largest = total == np.repeat(np.maximum.reduceat(total, starts), lengths)
    at = np.minimum.reduceat(np.where(is_largest, np.arange(len(total)), len(total)), starts)
    return MomentBytes(*(column[at] for column in moments))
