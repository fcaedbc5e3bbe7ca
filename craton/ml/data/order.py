"""Sample order: pure functions of (seed, index) that keep no state and no list.

`shuffled` walks every epoch in a new order and misses nothing. `Turns` gives the source of sample i in a mixture, and
how many samples of that source came before it. Both take any index directly, so a loader's state is one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
_WORD = (1 << 64) - 1
Words = NDArray[np.uint64]


def key_of(*numbers: int) -> int:
    """Mix a few numbers, e.g. (seed, epoch), into 64 bits."""
    key = 0
    for number in numbers:
        key = _mix_number((key ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD)
    return key


def permute(indices: NDArray[np.integer], count: int, key: int) -> NDArray[np.int64]:
    """Return where a keyed shuffle of [0, count) puts each index; a bijection.

    A Feistel network on pairs (high, low) with high · low just over `count`: each round adds a hash of one half to the
    other. This can be undone, so pairs map one to one. The few that fall outside [0, count) go through again.
    """
    high = np.uint64(isqrt(count - 1) + 1)
    low = np.uint64(-(-count // int(high)))
    keys = [np.uint64(key_of(key, number)) for number in range(ROUNDS)]

    def rounds(values: Words) -> Words:
        first, second = values // low, values % low
        for number, round_key in enumerate(keys):
            if number % 2:
                second = (second + _mix(first ^ round_key) % low) % low
            else:
                first = (first + _mix(second ^ round_key) % high) % high
        return first * low + second

    places = rounds(np.asarray(indices).astype(np.uint64))
    while (outside := places >= np.uint64(count)).any():
        places[outside] = rounds(places[outside])
    return places.astype(np.int64)


def shuffled(index: int, count: int, seed: int) -> int:
    """Return which of `count` items is at `index` of an endless walk with a new shuffle in every epoch."""
    epoch, position = divmod(index, count)
    return int(permute(np.array([position]), count, key_of(seed, epoch))[0])


class Turns:
    """Assigns indices to sources so that over every prefix each source has its share, to within one sample for each
    halving of the list of sources. At a node of that tree the left half has had exactly floor(n · share + 1/2) of n."""

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights, "a mixture has sources"
        assert min(weights) > 0, f"weights {weights} are not all positive"
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._shares: dict[tuple[int, int], Fraction] = {}

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (source, index within that source) of the sample at `index`."""
        first, last = 0, len(self._weights)
        while last - first > 1:
            middle = (first + last) // 2
            share = self._share(first, middle, last)
            before = _taken(index, share)
            if _taken(index + 1, share) > before:
                last, index = middle, before
            else:
                first, index = middle, index - before
        return first, index

    def _share(self, first: int, middle: int, last: int) -> Fraction:
        share = self._shares.get((first, last))
        if share is None:
            whole = sum(self._weights[first:last], Fraction())
            share = self._shares[first, last] = sum(self._weights[first:middle], Fraction()) / whole
        return share


def _taken(count: int, share: Fraction) -> int:
    return (2 * count * share.numerator + share.denominator) // (2 * share.denominator)


def _mix_number(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def _mix(values: Words) -> Words:
    """The same for arrays; unsigned multiplication wraps as intended."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
