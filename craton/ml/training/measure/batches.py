"""What a step's batches look like, to notice data that repeat or are constant, and labels that are not shifted. Costs
microseconds on the host."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW_ROWS = 256  # newest rows, among which distinct ones are counted
SAMPLED = 256  # elements of a row, evenly spaced, that stand for it
MAX_ROWS_A_STEP = 64  # of a large batch, only these are looked at
OWN = ("tokens", "labels", "positions", "weight", "documents")


class BatchStatistics:
    """Counts distinct rows over the newest steps."""

    def __init__(self) -> None:
        self._rows: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def add(self, batches: Sequence[Mapping[str, NDArray]]) -> dict[str, float]:
        """Return the metrics of a step: the share of distinct rows; of one row the distinct token ids, and the share of
        labels that are the token itself."""
        rows = [(arrays, row) for arrays in batches for row in range(len(arrays["tokens"]))][:MAX_ROWS_A_STEP]
        for arrays, row in rows:
            self._add(_checksum(arrays, row))
        arrays = batches[0]
        metrics = {"distinct_row_share": len(self._counts) / max(1, len(self._rows))}
        if arrays.keys() <= set(OWN):  # with arrays of the user's own, the tokens may be placeholders
            metrics["distinct_tokens"] = float(len(set(_sampled(arrays["tokens"][0]).tolist())))
            if (copied := _copied_share(arrays)) is not None:
                metrics["copied_label_share"] = copied
        return metrics

    def _add(self, checksum: int) -> None:
        self._rows.append(checksum)
        self._counts[checksum] += 1
        if len(self._rows) > WINDOW_ROWS:
            old = self._rows.popleft()
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]


def _checksum(arrays: Mapping[str, NDArray], row: int) -> int:
    """Return a checksum of what a row trains on: its tokens, and the user's own arrays."""
    checksum = 0
    for name, array in arrays.items():
        if name == "tokens" or name not in OWN:
            checksum = zlib.crc32(np.ascontiguousarray(_sampled(array[row])).tobytes(), checksum)
    return checksum


def _copied_share(arrays: Mapping[str, NDArray]) -> float | None:
    """Return the share of labels of the first row that equal the token at the same place; None: it has no labels."""
    if "labels" not in arrays:
        return None
    tokens, labels = _sampled(arrays["tokens"][0]), _sampled(arrays["labels"][0])
    counts = labels >= 0
    if "weight" in arrays:
        counts = counts & (_sampled(arrays["weight"][0]) > 0)
    return float((tokens == labels)[counts].mean()) if counts.any() else None


def _sampled(row: NDArray) -> NDArray:
    flat = np.asarray(row).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)]
