"""The order of samples: nothing missed, nothing twice, shares held, and no state."""

from __future__ import annotations

import numpy as np
import pytest

from craton.ml.data.order import Turns, permute, shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 97, 1000, 65_537])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_a_permutation_is_a_bijection(count: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(count), count, key)), np.arange(count))


def test_a_permutation_shuffles() -> None:
    """Places are spread evenly, neighbours part, and another key gives another order."""
    count = 20_000
    places = permute(np.arange(count), count, 5)
    assert abs(np.corrcoef(np.arange(count), places)[0, 1]) < 0.03
    assert (np.abs(np.diff(places)) == 1).mean() < 0.001
    first_half = places[: count // 2]
    assert abs((first_half < count // 2).mean() - 0.5) < 0.02
    assert (permute(np.arange(count), count, 6) == places).mean() < 0.001


def test_one_index_of_a_huge_range_needs_no_list() -> None:
    assert 0 <= shuffled(3 * 10**14 + 7, 10**14, seed=0) < 10**14


def test_epochs_differ_and_each_is_whole() -> None:
    first = [shuffled(index, 50, seed=3) for index in range(50)]
    second = [shuffled(index, 50, seed=3) for index in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [shuffled(index, 50, seed=4) for index in range(50)]


@pytest.mark.parametrize("weights", [(1,), (1, 1), (0.7, 0.3), (5, 3, 2), (0.01, 0.99), (1, 2, 3, 4, 5, 6, 7)])
def test_every_prefix_of_a_mixture_has_its_shares(weights: tuple[float, ...]) -> None:
    turns, counts = Turns(weights), [0] * len(weights)
    for index in range(2000):
        source, within = turns(index)
        assert within == counts[source], "each source is walked without gaps"
        counts[source] += 1
        for number, weight in enumerate(weights):
            assert abs(counts[number] - (index + 1) * weight / sum(weights)) < 1 + len(weights).bit_length() / 2
    assert turns(10**15)[1] <= 10**15
