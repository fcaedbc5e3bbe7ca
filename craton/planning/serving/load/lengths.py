"""Distributions of lengths in tokens: fixed, uniform or lognormal. What planning needs are their moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist

import numpy as np

NODES = 16  # equally likely lengths that stand for a distribution
Z95 = NormalDist().inv_cdf(0.95)
MAX_P95 = math.exp(Z95 * Z95 / 2)  # 3.87, of the mean of a lognormal distribution


@dataclass(frozen=True)
class TokenLengths:
    """A distribution as equally likely lengths in ascending order; one of a fixed length."""

    values: tuple[float, ...]

    @classmethod
    def fixed(cls, length: float) -> TokenLengths:
        return cls((float(length),))

    @classmethod
    def uniform(cls, shortest: float, longest: float) -> TokenLengths:
        """Return lengths between both ends, whose mean and variance are those of the range."""
        shares = (np.arange(NODES) + 0.5) / NODES
        exact = math.sqrt(NODES**2 / (NODES**2 - 1))  # midpoints spread a little less than the range
        return cls(tuple((shortest + longest) / 2 + (longest - shortest) * (shares - 0.5) * exact))

    @classmethod
    def lognormal(cls, mean: float, p95: float) -> TokenLengths:
        """Return a lognormal distribution by its mean and its 95th percentile.

        ln p95 − ln mean = z·s − s²/2, of which the smaller root is meant; it exists up to MAX_P95 times the mean.
        """
        spread = Z95 - math.sqrt(max(Z95 * Z95 - 2 * math.log(p95 / mean), 0.0))
        return cls.lognormal_of_spread(mean, spread)

    @classmethod
    def lognormal_of_spread(cls, mean: float, spread: float) -> TokenLengths:
        """Return a lognormal distribution by its mean and the standard deviation of its logarithm: the mean of each of
        NODES equally likely ranges."""
        normal = NormalDist()
        edges = [-math.inf, *(normal.inv_cdf(node / NODES) for node in range(1, NODES)), math.inf]
        below = [normal.cdf(edge - spread) for edge in edges]
        return cls(tuple(mean * NODES * (high - low) for low, high in pairwise(below)))

    def scaled(self, factor: float) -> TokenLengths:
        return TokenLengths(tuple(value * factor for value in self.values))

    @cached_property
    def array(self) -> np.ndarray:
        return np.asarray(self.values)

    @cached_property
    def mean(self) -> float:
        return float(self.array.mean())

    @cached_property
    def second_moment(self) -> float:
        return float((self.array**2).mean())

    @property
    def variance(self) -> float:
        return max(0.0, self.second_moment - self.mean**2)

    @property
    def longest(self) -> float:
        return self.values[-1]
