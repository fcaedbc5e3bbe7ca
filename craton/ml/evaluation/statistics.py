"""Statistics of an evaluation: intervals, pass@k, majority@k and paired comparison; pure functions.

Problems are the unit that is drawn at random, so several samples of one problem count as one cluster. All results are
functions of their arguments: resampling has a fixed seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
MAX_EXACT = 16  # differences of a sign-flip test that are enumerated: 65,536 ways; more are drawn
FLIPS = 100_000
_SEED = 0


def wilson_interval(solved: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a proportion without continuity correction (Wilson 1927)."""
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = solved / count
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Without or with only right ones an end is exact, which rounding would miss.
    return 0.0 if solved == 0 else max(0.0, middle - half), 1.0 if solved == count else min(1.0, middle + half)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean over problems, each of which has one value in [0, 1]. Where
    all are equal, resampling knows no spread: then Wilson's interval over problems."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 0:
        return 0.0, 1.0
    if np.ptp(array) == 0:
        return wilson_interval(float(array.sum()), len(array), confidence)
    means = _resampled_means(array)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def accuracy_interval(shares: Sequence[float], is_single: bool) -> tuple[float, float]:
    """Return the interval of an accuracy from the share of right samples of each problem: Wilson's where each has one
    sample, else the bootstrap over problems."""
    return wilson_interval(sum(shares), len(shares)) if is_single else mean_interval(shares)


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374)."""
    assert 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_at(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """Return how probable it is that the most frequent answer of k of these samples, drawn without replacement, is
    right: exact over all subsets. Ties are broken at random; None does not vote. A subset without votes is wrong; where
    samples with one answer were judged differently, the share of right ones counts."""
    assert 1 <= k <= len(answers) == len(is_right)
    counts = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, right in zip(answers, is_right, strict=True) if right and answer is not None)
    silent = sum(answer is None for answer in answers)
    total = 0.0
    for answer, num_right in right.items():
        others = tuple(sorted(count for other, count in counts.items() if other != answer))
        total += num_right / counts[answer] * _wins(counts[answer], others, silent, k)
    return total / comb(len(answers), k)


@cache
def _wins(own: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Return the number of subsets of k samples in which an answer with `own` samples wins; a tie of t answers counts
    1 / t."""
    found = 0.0
    for most in range(1, min(own, k) + 1):
        # ways[size, ties]: subsets of the others so far, of which none has more than `most`, and `ties` have as many
        ways = {(0, 0): 1}
        for count in others:
            following: dict[tuple[int, int], int] = {}
            for (size, ties), number in ways.items():
                for taken in range(min(count, most, k - most - size) + 1):
                    key = (size + taken, ties + (taken == most))
                    following[key] = following.get(key, 0) + number * comb(count, taken)
            ways = following
        own_ways = comb(own, most)
        for (size, ties), number in ways.items():
            found += own_ways * number * comb(silent, k - most - size) / (ties + 1)
    return found


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, … up to a limit, and the limit itself."""
    sizes = [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]
    return sizes if sizes and sizes[-1] == limit else [*sizes, limit]


@dataclass(frozen=True)
class PairedComparison:
    """Two models on the same problems: the difference of accuracies (first minus second) and how surprising it is."""

    num_problems: int
    difference: float
    low: float
    high: float
    p_value: float
    test: str  # mcnemar: one sample each, exact; sign-flip: several samples
    num_better: int  # problems that the first one solves more often
    num_worse: int


def compare_paired(first: Sequence[float], second: Sequence[float]) -> PairedComparison:
    """Compare shares of right samples, problem by problem, with a two-sided test."""
    assert len(first) == len(second)
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    is_single = all(share in (0.0, 1.0) for share in (*first, *second))
    p_value = mcnemar_p_value(better, worse) if is_single else sign_flip_p_value(differences)
    if len(differences) == 0:
        return PairedComparison(0, 0.0, -1.0, 1.0, 1.0, "mcnemar", 0, 0)
    mean = float(differences.mean())
    low, high = mean, mean
    if np.ptp(differences) > 0:
        low, high = map(float, np.quantile(_resampled_means(differences), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
    test = "mcnemar" if is_single else "sign-flip"
    return PairedComparison(len(differences), mean, low, high, p_value, test, better, worse)


def mcnemar_p_value(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: a binomial test of the discordant problems."""
    count, fewer = better + worse, min(better, worse)
    tail = sum(comb(count, number) for number in range(fewer + 1))
    return min(1.0, 2.0 * tail / float(2**count))


def sign_flip_p_value(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the two-sided p-value of the permutation test that flips the signs of paired differences: exact for up to
    MAX_EXACT differences, else from FLIPS draws with a fixed seed, of which the observed one is one."""
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    observed = abs(float(values.sum())) - 1e-9
    if len(values) <= MAX_EXACT:
        numbers = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
        return float((np.abs((1 - 2 * numbers) @ values) >= observed).mean())
    generator = np.random.default_rng(_SEED)
    extreme = 0
    for _ in range(FLIPS // 1000):
        signs = generator.integers(0, 2, size=(1000, len(values))) * 2 - 1
        extreme += int((np.abs(signs @ values) >= observed).sum())
    return (extreme + 1) / (FLIPS + 1)


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of RESAMPLES bootstrap samples. They are drawn in rows of bounded memory."""
    generator = np.random.default_rng(_SEED)
    rows = max(1, min(RESAMPLES, 2_000_000 // len(values)))
    parts = []
    for first in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - first)
        parts.append(values[generator.integers(0, len(values), size=(count, len(values)))].mean(axis=1))
    return np.concatenate(parts)
