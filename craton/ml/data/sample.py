"""One row of training data, and the protocol of data sources.

A `Source` is a pure function of the global sample index: sample 17 has the same arrays in any order and after any
restart. Rows are `sequence` long and packed: `labels[t]` is the token after `tokens[t]`, IGNORED where that token
belongs to another document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a label without loss

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One row. `documents` numbers the documents of the row from 0; None: the row is one document."""

    tokens: Integers  # [sequence]
    labels: Integers  # [sequence]
    positions: Integers  # [sequence], from 0 in every document
    weight: NDArray[np.float32]  # [sequence], loss weight of each label
    documents: NDArray[np.int32] | None = None  # [sequence]
    extra: Mapping[str, NDArray] = field(default_factory=dict)  # passed from a user's data source to a user's objective


@runtime_checkable
class Source(Protocol):
    """Samples by their global index. `epoch_samples`: how many there are before they repeat; None: unknown."""

    @property
    def sequence(self) -> int: ...

    @property
    def epoch_samples(self) -> int | None: ...

    def sample(self, index: int) -> Sample: ...


def window(tokens: Integers, boundaries: Integers | None) -> Sample:
    """Build the row from `sequence` + 1 tokens of a stream. A document begins at each of the `boundaries` (0 is not
    among them); None: the stream counts as one document."""
    length = len(tokens) - 1
    labels = tokens[1:].copy()
    if boundaries is None:
        return Sample(tokens[:-1], labels, np.arange(length), np.ones(length, np.float32))
    documents = np.zeros(length + 1, np.int32)
    documents[boundaries] = 1
    np.cumsum(documents, dtype=np.int32, out=documents)
    starts = np.concatenate(([0], boundaries))
    labels[documents[1:] != documents[:-1]] = IGNORED
    positions = np.arange(length) - starts[documents[:-1]]
    return Sample(tokens[:-1], labels, positions, (labels != IGNORED).astype(np.float32), documents[:-1])


def collate(samples: Sequence[Sample]) -> dict[str, NDArray]:
    """Stack rows into the arrays of one micro-batch, [rows, sequence]. `documents` is omitted when no row has any."""
    assert samples, "a micro-batch has at least one row"
    arrays: dict[str, NDArray] = {
        name: np.stack([getattr(sample, name) for sample in samples])
        for name in ("tokens", "labels", "positions", "weight")
    }
    if any(sample.documents is not None for sample in samples):
        one = np.zeros_like(samples[0].tokens, np.int32)
        arrays["documents"] = np.stack([one if row.documents is None else row.documents for row in samples])
    for name in samples[0].extra:
        arrays[name] = np.stack([sample.extra[name] for sample in samples])
    return arrays
