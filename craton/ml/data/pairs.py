"""Preference rows: whole pairs packed into rows, so that no cut of a batch separates the sequences of a pair.

Document 2k of a row is the chosen and 2k + 1 the rejected sequence of its k-th pair; each begins with the prompt. Rows
are filled best-fit over the length of whole pairs, once, the same on every rank. A pair that is longer than a row loses
the ends of its completions, never of its prompt: the longer sequence first, until both have half of the row. A pair
without a completion left, or with equal ones, is left out. Both are counted.

Arrays of a row besides the usual ones, aligned with the labels: `pair` is the pair's index in the row (-1: padding),
`side` 1 on chosen, -1 on rejected, 0 on padding; `pair_start` is 1 at one label of each pair, `last` at the last token
of each sequence. `reference` [pairs, 2] holds the reference log-probabilities of the completions; 0 without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from craton.job import Job
from craton.ml.data.conversations import Rows, best_fit, remember_rows, remembered_rows
from craton.ml.data.errors import DataError
from craton.ml.data.indexed_function import IndexedFunction
from craton.ml.data.order import shuffled
from craton.ml.data.pair_rows import PairEncoder
from craton.ml.data.sample import IGNORED, Integers, Sample
from craton.ml.data.shards import Shards

Sequences = Sequence[tuple[Integers, NDArray[np.bool_]]]  # token ids and loss masks: chosen, rejected, chosen, …


class PairedSource(Protocol):
    """Samples whose pairs have numbers, by which their reference log-probabilities are kept."""

    slots: int  # maximum pairs in a row
    sequence: int
    reference: NDArray[np.float32] | None  # [pairs, 2]

    @property
    def epoch_samples(self) -> int | None: ...

    @property
    def mark(self) -> NDArray[np.uint64]:
        """Differs where the tokens of a pair may differ."""

    @property
    def cache_folder(self) -> Path | None:
        """Where values of the pairs may be kept."""

    def num_pairs(self, samples: int) -> int:
        """Return how many numbers the pairs of these samples have at most."""

    def sample(self, index: int) -> Sample: ...

    def pair_numbers(self, index: int) -> Integers:
        """Return the numbers of a sample's pairs."""


class PairSource:
    """Packed rows of the pairs of a folder of shards."""

    def __init__(self, shards: Shards, sequence: int, seed: int, pack: bool = True, vocab: int | None = None) -> None:
        if shards.index.kind != "pair":
            raise DataError(
                f"{shards.folder}: holds {shards.index.kind}, not pairs; kind dpo needs JSONL or Parquet with prompt, "
                "chosen and rejected"
            )
        if vocab is not None:
            shards.check_vocabulary(vocab)
        self.shards, self.sequence = shards, sequence
        self.rows = plan_pairs(shards, sequence, pack)
        self.epoch_samples = len(self.rows)
        self.slots = int(np.diff(self.rows.starts).max())
        self.reference: NDArray[np.float32] | None = None
        self._seed, self._vocab = seed, vocab
        self._ends = shards.document_ends()

    @property
    def mark(self) -> NDArray[np.uint64]:
        return np.append(self.shards.mark, np.uint64(self.sequence))

    @property
    def cache_folder(self) -> Path | None:
        return self.shards.folder

    def num_pairs(self, _samples: int = 0) -> int:
        return len(self._ends) // 2

    def pair_numbers(self, index: int) -> Integers:
        row = shuffled(index, self.epoch_samples, self._seed)
        return self.rows.order[self.rows.starts[row] : self.rows.starts[row + 1]]

    def sample(self, index: int) -> Sample:
        numbers = self.pair_numbers(index)
        sequences = [item for number in numbers.tolist() for item in self._read(number)]
        return pack_pairs(sequences, self.sequence, self.slots, _values_of(self.reference, numbers))

    def _read(self, number: int) -> Sequences:
        starts = [int(self._ends[2 * number - 1]) if number else 0, int(self._ends[2 * number])]
        chosen, rejected = (self._ends[[2 * number + side]] - starts[side] for side in (0, 1))
        fitted = fitted_lengths(chosen, rejected, self.sequence)
        stops = [start + int(length[0]) for start, length in zip(starts, fitted, strict=True)]
        return [
            (self.shards.read(start, stop, self._vocab), self.shards.learnt(start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]


class PairFunction:
    """Pairs of a user's function, which gives the row of an index; one pair to a sample."""

    slots = 1
    epoch_samples = cache_folder = None

    def __init__(self, function: IndexedFunction, encode: PairEncoder, sequence: int, vocab: int | None = None) -> None:
        self.sequence = sequence
        self.reference: NDArray[np.float32] | None = None
        self._function, self._encode, self._vocab = function, encode, vocab

    @classmethod
    def of_job(cls, job: Job, split: str, encode: PairEncoder, vocab: int | None) -> PairFunction:
        example = "lambda index: {'prompt': …, 'chosen': …, 'rejected': …}"
        return cls(IndexedFunction.of_job(job, split, "pair", example), encode, job.sequence, vocab)

    @property
    def mark(self) -> NDArray[np.uint64]:
        return np.array([self.sequence], np.uint64)

    def num_pairs(self, samples: int) -> int:
        return samples

    def pair_numbers(self, index: int) -> Integers:
        return np.array([index])

    def sample(self, index: int) -> Sample:
        where, row = self._function.place(index), self._function(index)
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is {type(row).__name__}; needed: a row with prompt, chosen and rejected")
        try:
            sides = self._encode.encode(row)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        sequences = [(np.array(ids, np.int64), np.array(learnt, bool)) for ids, learnt in sides]
        self._check(where, sequences)
        return pack_pairs(sequences, self.sequence, self.slots, _values_of(self.reference, self.pair_numbers(index)))

    def _check(self, where: str, sequences: Sequences) -> None:
        length = sum(len(ids) for ids, _ in sequences)
        if length > self.sequence:
            raise DataError(f"{where} has {length:,} tokens, more than data.sequence {self.sequence:,}; increase it")
        largest = max(int(ids.max()) for ids, _ in sequences)
        if self._vocab is not None and largest >= self._vocab:
            raise DataError(f"{where} has token id {largest:,}, outside the vocabulary of {self._vocab:,}")


def plan_pairs(shards: Shards, sequence: int, pack: bool = True) -> Rows:
    """Plan the rows for one length; cached beside the shards if that folder is writable."""
    cache = shards.folder / f"pairs-{sequence}{'' if pack else '-single'}.npz"
    if (result := remembered_rows(cache, shards.mark)) is not None:
        return result
    ends = shards.document_ends()
    starts = np.concatenate(([0], ends[:-1]))
    lengths = ends - starts
    fitted = np.stack(fitted_lengths(lengths[0::2], lengths[1::2], sequence), axis=1)
    stops = starts + fitted.reshape(-1)
    learnt = np.concatenate(([0], np.cumsum(shards.learnt(0, shards.tokens))))
    num_learnt = learnt[stops] - learnt[np.minimum(starts + 1, stops)]
    has_completion = num_learnt.reshape(-1, 2).min(axis=1) > 0
    is_cut = fitted.sum(axis=1) < lengths[0::2] + lengths[1::2]
    for pair in np.flatnonzero(is_cut & has_completion):  # without their ends, completions may be equal
        chosen, rejected = (shards.read(int(starts[place]), int(stops[place])) for place in (2 * pair, 2 * pair + 1))
        has_completion[pair] = not np.array_equal(chosen, rejected)
    kept = np.flatnonzero(has_completion)
    if not len(kept):
        shortest = int((lengths[0::2] + lengths[1::2]).min())
        raise DataError(
            f"{shards.folder}: no pair has both completions within data.sequence {sequence:,}, which holds a whole "
            f"pair (the shortest has {shortest:,} tokens); increase it"
        )
    sizes = fitted.sum(axis=1)[kept]
    order, row_starts = best_fit(sizes, sequence) if pack else (np.arange(len(kept)), np.arange(len(kept) + 1))
    rows = Rows(kept[order], row_starts, int(is_cut[kept].sum()), len(has_completion) - len(kept))
    remember_rows(cache, rows, shards.mark)
    return rows


def fitted_lengths(chosen: Integers, rejected: Integers, sequence: int) -> tuple[Integers, Integers]:
    """Return how many tokens of each sequence of a pair are used: all if both fit into a row, else the longer one gets
    what the other leaves, at least half."""
    half = sequence // 2
    return (
        np.minimum(chosen, np.maximum(half, sequence - rejected)),
        np.minimum(rejected, np.maximum(half, sequence - chosen)),
    )


def pack_pairs(sequences: Sequences, length: int, slots: int, reference: NDArray[np.float32] | None = None) -> Sample:
    """Build a row from the sequences of its pairs: chosen, rejected, chosen, …"""
    tokens = np.zeros(length, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    positions = np.arange(length)
    documents = np.full(length, len(sequences), np.int32)
    pair = np.full(length, -1, np.int64)
    side, pair_start, last = (np.zeros(length, np.float32) for _ in range(3))
    place = 0
    for number, (ids, learnt) in enumerate(sequences):
        here, predicting = slice(place, place + len(ids)), slice(place, place + len(ids) - 1)
        tokens[here] = ids
        labels[predicting] = np.where(learnt[1:], ids[1:], IGNORED)
        positions[here] = np.arange(len(ids))
        documents[here] = number
        pair[here] = number // 2
        side[here] = -1.0 if number % 2 else 1.0
        if number % 2 == 0:
            pair_start[place + int(np.argmax(learnt[1:]))] = 1.0
        last[here.stop - 1] = 1.0
        place = here.stop
    positions[place:] = np.arange(length - place)
    kept = np.zeros((slots, 2), np.float32)
    if reference is not None:
        kept[: len(reference)] = reference
    extra: dict[str, NDArray] = {"pair": pair, "side": side, "pair_start": pair_start, "last": last, "reference": kept}
    return Sample(tokens, labels, positions, (labels != IGNORED).astype(np.float32), documents, extra)


def _values_of(reference: NDArray[np.float32] | None, numbers: Integers) -> NDArray[np.float32] | None:
    if reference is None:
        return None
    values = reference[numbers] if numbers.max() < len(reference) else np.array([np.nan])
    if np.isnan(values).any():
        raise DataError(
            f"pair {int(numbers[0])} has no reference log-probability: the run has left out more samples than it has "
            "steps for; start it again, with train.on_nan: skip"
        )
    return values
