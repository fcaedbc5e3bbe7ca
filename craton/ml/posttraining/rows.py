"""Rows of an optimizer update from sampled sequences: packed, shared among the data-parallel ranks, padded.

Every rank computes the same plan from the same samples. Sequences are packed best-fit, rows are dealt so that the
ranks have about the same number of tokens, and rows without weight fill up: every rank then has the same number of
micro-batches, a multiple of the pipeline's stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from craton.job.layout import Layout
from craton.ml.data import Sample, best_fit, collate

IGNORED = -100  # a label without loss

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray]


@dataclass
class TrainedSequence:
    """A prompt with a completion. `weight` and `values` are aligned with labels: entry t is about token t + 1."""

    tokens: NDArray[np.int64]  # [n]
    weight: Floats  # [n - 1]: 1 on generated tokens that are trained
    values: dict[str, Floats] = field(default_factory=dict)  # name → [n - 1], become extras of the batch

    @property
    def places(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class RowPlan:
    """Which sequences share a row, and which rows each data-parallel rank has, in micro-batches of its own."""

    rows: list[list[int]]  # indices of sequences
    shares: list[list[int]]  # by data-parallel rank, indices of rows; -1: a row of padding

    @classmethod
    def of(cls, lengths: Sequence[int], capacity: int, layout: Layout, packs: bool = True) -> RowPlan:
        """Plan rows for sequences that take these numbers of places."""
        places = np.array(lengths, np.int64)
        if packs and len(places):
            order, starts = best_fit(places, capacity)
            rows = [order[begin:end].tolist() for begin, end in pairwise(starts.tolist())]
        else:
            rows = [[index] for index in range(len(places))]
        ranks = layout.data_parallel
        together = layout.micro_batch * layout.pp
        per_rank = max(1, -(-len(rows) // (ranks * together))) * together
        shares: list[list[int]] = [[] for _ in range(ranks)]
        fullest_first = sorted(range(len(rows)), key=lambda row: -int(places[rows[row]].sum()))
        for turn, row in enumerate(fullest_first):  # forth and back, so that no rank always has the fuller one
            lap, seat = divmod(turn, ranks)
            shares[seat if lap % 2 == 0 else ranks - 1 - seat].append(row)
        return cls(rows, [share + [-1] * (per_rank - len(share)) for share in shares])


def micro_batches(
    plan: RowPlan,
    sequences: Sequence[TrainedSequence],
    names: Sequence[str],
    rank: int,
    layout: Layout,
    capacity: int,
    slots: int,
) -> list[Arrays]:
    """Return the micro-batches of one data-parallel rank, with the values of these names. Each row has room for `slots`
    sequences."""
    rows = [
        row_sample([] if row < 0 else [sequences[index] for index in plan.rows[row]], names, capacity, slots)
        for row in plan.shares[rank]
    ]
    size = layout.micro_batch
    return [collate(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def row_sample(members: Sequence[TrainedSequence], names: Sequence[str], capacity: int, slots: int) -> Sample:
    """Return one row, with the extras that policy objectives read."""
    tokens = np.zeros(capacity, np.int64)
    labels = np.full(capacity, IGNORED, np.int64)
    positions, documents = np.arange(capacity), np.zeros(capacity, np.int32)
    weight = np.zeros(capacity, np.float32)
    sequence, start = np.full(capacity, -1, np.int64), np.zeros(capacity, np.float32)
    counts = np.zeros(slots, np.float32)
    extra: dict[str, NDArray] = {name: np.zeros(capacity, np.float32) for name in names}
    place = 0
    for number, member in enumerate(members):
        here = slice(place, place + member.places)
        tokens[here], labels[here] = member.tokens[:-1], member.tokens[1:]
        positions[here], documents[here], sequence[here] = np.arange(member.places), number, number
        weight[here] = member.weight
        weighted = np.flatnonzero(member.weight)
        if len(weighted):
            start[place + weighted[0]] = 1.0
        counts[number] = member.weight.sum()
        for name in names:
            extra[name][here] = member.values[name]
        place = here.stop
    documents[place:] = len(members)
    positions[place:] = np.arange(capacity - place)
    extra |= {"sequence": sequence, "sequence_start": start, "sequence_tokens": counts}
    return Sample(tokens, labels, positions, weight, documents, extra)


def num_slots(samples: int, capacity: int) -> int:
    """Return for how many sequences rows have room: the same in every step, and never `capacity`, because arrays of
    that width are taken for tokens."""
    return samples if samples < capacity else capacity + 1


def unpacked(plan: RowPlan, lengths: Sequence[int], values: NDArray) -> list[NDArray]:
    """Return the values of each sequence, [places], from those of the rows, [rows, capacity]."""
    found: list[NDArray] = [np.zeros(0, values.dtype)] * len(lengths)
    for row, members in enumerate(plan.rows):
        place = 0
        for index in members:
            found[index] = values[row, place : place + lengths[index]]
            place += lengths[index]
    return found
