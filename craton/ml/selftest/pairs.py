"""Choose which units measure together, round by round, until the slow one is known. Pure functions, so every rank
decides the same.

All units measure at the same time, in N/2 pairs: first with one neighbour, then with the other. A unit that was in a
fast pair is healthy. A unit whose pairs were all slow is a suspect: a last round pairs it with a healthy unit that it
has not met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

Pair = tuple[int, int]
Rates = Mapping[Pair, float]  # bytes per second
SLOW = 0.6  # share of the expected rate (or of the fast pairs' rate) below which a pair is slow


def next_pairs(rounds: Sequence[Rates], num_units: int, expected: float = 0.0) -> list[Pair]:
    """Return the pairs of the next round; an empty list when the slow units are known."""
    everybody = everybody_twice(num_units)
    if len(rounds) < len(everybody):
        return everybody[len(rounds)]
    if len(rounds) > len(everybody):
        return []
    suspected = suspects(rounds, num_units, expected)
    fine = [unit for unit in range(num_units) if unit not in suspected]
    met = {frozenset(pair) for rates in rounds for pair in rates}
    chosen: list[Pair] = []
    for unit in suspected:
        partner = next((item for item in fine if frozenset((item, unit)) not in met), None)
        if partner is not None:
            fine.remove(partner)
            chosen.append((min(unit, partner), max(unit, partner)))
    return chosen


def everybody_twice(num_units: int) -> list[list[Pair]]:
    """Return the rounds in which every unit meets both of its neighbours on a ring."""
    if num_units < 3:
        return [[(0, 1)]] if num_units == 2 else []
    neighbours = [(unit, unit + 1) for unit in range(0, num_units - 1, 2)]
    shifted = [(unit, unit + 1) for unit in range(1, num_units - 1, 2)]
    around = (0, num_units - 1)
    # With an odd number of units, one is left over in each round; these two meet in a third round.
    return [neighbours, [*shifted, around]] if num_units % 2 == 0 else [neighbours, shifted, [around]]


def suspects(rounds: Sequence[Rates], num_units: int, expected: float = 0.0) -> list[int]:
    """Return the units that were slow with every partner."""
    slow = slow_pairs(rounds, expected)
    everyone = [pair for rates in rounds for pair in rates]
    return [
        unit
        for unit in range(num_units)
        if (met := [pair for pair in everyone if unit in pair]) and all(pair in slow for pair in met)
    ]


def slow_pairs(rounds: Sequence[Rates], expected: float = 0.0) -> set[Pair]:
    """Return the pairs below the expected rate, or, without one, below the rate of the fast pairs."""
    rates = {pair: rate for item in rounds for pair, rate in item.items()}
    if not rates:
        return set()
    limit = SLOW * (expected or fast_rate(list(rates.values())))
    return {pair for pair, rate in rates.items() if rate < limit}


def fast_rate(rates: Sequence[float]) -> float:
    """Return the upper quartile. The median would not do: one slow unit is in up to half of all pairs."""
    return sorted(rates)[ceil(0.75 * len(rates)) - 1]
