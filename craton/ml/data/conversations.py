"""Fine-tuning rows from chat shards, with sequence packing: several conversations per row, each its own document.

Rows are filled best-fit, longest conversations first. The plan is made once from the lengths and is the same on every
rank. A conversation longer than a row is truncated at its end; one without a learnt token left is dropped. Both are
counted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craton.ml.data.errors import DataError
from craton.ml.data.order import shuffled
from craton.ml.data.sample import IGNORED, Integers, Sample
from craton.ml.data.shards import Shards


@dataclass(frozen=True)
class Rows:
    """Which conversations (or pairs) share a row: those of row r are `order[starts[r] : starts[r + 1]]`."""

    order: Integers
    starts: Integers
    truncated: int
    dropped: int

    def __len__(self) -> int:
        return len(self.starts) - 1


class ChatSource:
    """Packed rows of conversations; the loss mask covers only assistant tokens. A conversation of n tokens takes n - 1
    places: its last token is only a label."""

    def __init__(self, shards: Shards, sequence: int, seed: int, pack: bool = True, vocab: int | None = None) -> None:
        if shards.index.kind != "chat":
            raise DataError(f"{shards.folder}: holds plain text, which has no loss mask; kind sft needs chat JSONL")
        if vocab is not None:
            shards.check_vocabulary(vocab)
        self.shards, self.sequence = shards, sequence
        self.rows = plan_rows(shards, sequence, pack)
        self.epoch_samples = len(self.rows)
        self._seed, self._pack, self._vocab = seed, pack, vocab
        self._ends = shards.document_ends()

    def sample(self, index: int) -> Sample:
        row = shuffled(index, self.epoch_samples, self._seed)
        tokens = np.zeros(self.sequence, np.int64)
        labels = np.full(self.sequence, IGNORED, np.int64)
        positions = np.arange(self.sequence)
        documents = np.zeros(self.sequence, np.int32)
        place = 0
        members = self.rows.order[self.rows.starts[row] : self.rows.starts[row + 1]]
        for number, conversation in enumerate(members.tolist()):
            start = int(self._ends[conversation - 1]) if conversation else 0
            stop = min(int(self._ends[conversation]), start + self.sequence + 1)
            ids = self.shards.read(start, stop, self._vocab)
            here = slice(place, place + len(ids) - 1)
            tokens[here] = ids[:-1]
            labels[here] = np.where(self.shards.learnt(start, stop)[1:], ids[1:], IGNORED)
            positions[here] = np.arange(len(ids) - 1)
            documents[here] = number
            place = here.stop
        documents[place:] = len(members)
        positions[place:] = np.arange(self.sequence - place)
        weight = (labels != IGNORED).astype(np.float32)
        return Sample(tokens, labels, positions, weight, documents if self._pack else None)


def plan_rows(shards: Shards, sequence: int, pack: bool = True) -> Rows:
    """Plan the rows for one length; cached beside the shards if that folder is writable."""
    cache = shards.folder / f"rows-{sequence}{'' if pack else '-single'}.npz"
    mark = shards.mark
    if (result := remembered_rows(cache, mark)) is not None:
        return result
    ends = shards.document_ends()
    starts = np.concatenate(([0], ends[:-1]))
    stops = np.minimum(ends, starts + sequence + 1)
    learnt = np.concatenate(([0], np.cumsum(shards.learnt(0, shards.tokens))))
    kept = np.flatnonzero((stops - starts >= 2) & (learnt[stops] - learnt[np.minimum(starts + 1, stops)] > 0))
    if not len(kept):
        raise DataError(
            f"{shards.folder}: no conversation has a learnt token within data.sequence {sequence:,}; increase it"
        )
    truncated = int((ends > stops)[kept].sum())
    lengths = (stops - starts)[kept] - 1
    order, row_starts = best_fit(lengths, sequence) if pack else (np.arange(len(kept)), np.arange(len(kept) + 1))
    rows = Rows(kept[order], row_starts, truncated, len(ends) - len(kept))
    remember_rows(cache, rows, mark)
    return rows


def best_fit(lengths: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Return (order, row starts): every length goes into the fullest row that still has room for it, longest first."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free places
    rooms = 0  # bit r: some row has exactly r free places
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        left = room - length
        if left:
            open_rows[left].append(row)
            rooms |= 1 << left
    order = np.array([item for row in rows for item in row], np.int64)
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return order, starts


def remembered_rows(cache: Path, mark: NDArray[np.uint64]) -> Rows | None:
    """Return the rows in a file, if they are of the shards with this mark."""
    try:
        with np.load(cache) as stored:
            if not np.array_equal(stored["mark"], mark):
                return None
            return Rows(stored["order"], stored["starts"], int(stored["truncated"]), int(stored["dropped"]))
    except (OSError, ValueError, KeyError, EOFError):
        return None


def remember_rows(cache: Path, rows: Rows, mark: NDArray[np.uint64]) -> None:
    """Write the rows to a file, if its folder is writable."""
    own = cache.with_name(f".{cache.name}.{os.getpid()}")
    try:
        with own.open("wb") as file:
            np.savez(
                file, order=rows.order, starts=rows.starts, truncated=rows.truncated, dropped=rows.dropped, mark=mark
            )
        own.replace(cache)
    except OSError:  # folder not writable: the plan is quick to make again
        own.unlink(missing_ok=True)
