"""Which units talk to which, round by round, until the slow one is known: pure, so that every rank decides alike.

All units measure at the same time, in N/2 pairs: first neighbours, then shifted by one. A unit that has been in a fast
pair is fine. One whose pairs were all slow is a suspect, and meets a fine one that it has not met in a last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

Pair = tuple[int, int]
Rates = Mapping[Pair, float]  # bytes per second
SLOW = 0.6  # of what is expected, or of what the fast pairs reach, below which a pair is slow


def next_pairs(rounds: Sequence[Rates], num_units: int, expected: float = 0.0) -> list[Pair]:
    """Who measures now; nobody when it is known."""
    everybody = everybody_twice(num_units)
    if len(rounds) < len(everybody):
        return everybody[len(rounds)]
    if len(rounds) > len(everybody):
        return []
    guilty = suspects(rounds, num_units, expected)
    fine = [unit for unit in range(num_units) if unit not in guilty]
    met = {frozenset(pair) for rates in rounds for pair in rates}
    chosen: list[Pair] = []
    for unit in guilty:
        partner = next((item for item in fine if frozenset((item, unit)) not in met), None)
        if partner is not None:
            fine.remove(partner)
            chosen.append((min(unit, partner), max(unit, partner)))
    return chosen


def everybody_twice(num_units: int) -> list[list[Pair]]:
    """Rounds in which every unit meets the one before and the one after it, around a ring."""
    if num_units < 3:
        return [[(0, 1)]] if num_units == 2 else []
    neighbours = [(unit, unit + 1) for unit in range(0, num_units - 1, 2)]
    shifted = [(unit, unit + 1) for unit in range(1, num_units - 1, 2)]
    around = (0, num_units - 1)
    # With an odd number of units one is left over in both rounds, and these two meet in a third.
    return [neighbours, [*shifted, around]] if num_units % 2 == 0 else [neighbours, shifted, [around]]


def suspects(rounds: Sequence[Rates], num_units: int, expected: float = 0.0) -> list[int]:
    """Units that were slow with everybody they met."""
    slow = slow_pairs(rounds, expected)
    everyone = [pair for rates in rounds for pair in rates]
    return [
        unit
        for unit in range(num_units)
        if (met := [pair for pair in everyone if unit in pair]) and all(pair in slow for pair in met)
    ]


def slow_pairs(rounds: Sequence[Rates], expected: float = 0.0) -> set[Pair]:
    """Pairs below what is expected, or else below what the fast ones reach."""
    rates = {pair: rate for item in rounds for pair, rate in item.items()}
    if not rates:
        return set()
    limit = SLOW * (expected or fast_rate(list(rates.values())))
    return {pair for pair, rate in rates.items() if rate < limit}


def fast_rate(rates: Sequence[float]) -> float:
    """The upper quartile: pairs of one slow unit, which meets many, are half of all pairs and would be the median."""
    return sorted(rates)[ceil(0.75 * len(rates)) - 1]
