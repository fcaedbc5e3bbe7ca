"""Accuracy of more samples, predicted from what fewer samples showed, with an 80% interval.

What is known: correct samples of every problem, or shares of problems solved by some numbers of samples (`pass_at`),
and where votes were counted their accuracy (`majority_at`). The posterior (`posterior`) over the mix of problems and
how far wrong answers agree follows. The interval holds the noise of a new measurement on the same problems.

Guarantees: deterministic; a share between 0 and 1, inside its interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from craton.planning.result import INTERVAL_LEVEL
from craton.planning.strategies.posterior import (
    Candidates,
    KnownAccuracy,
    noise_share,
    pass_candidates,
    vote_candidates,
)
from craton.planning.strategies.problem_mix import Floats, any_correct
from craton.planning.strategies.votes import win_probabilities

# What no candidate can know: the error of the curve itself, per doubling beyond the largest number of samples known, at
# an accuracy of 50%. From the fitting half of data/repeated_sampling.json.
SHAPE_ERROR = 0.005
VOTE_SHAPE_ERROR = 0.02

_QUANTILES = np.array([-1.6449, -1.0364, -0.6745, -0.3853, -0.1257, 0.1257, 0.3853, 0.6745, 1.0364, 1.6449])


@dataclass(frozen=True)
class PredictedAccuracy:
    """A predicted share of problems solved, with its 80% interval."""

    accuracy: float
    low: float
    high: float


class AccuracyCurve:
    """Predicts the accuracy of pass@n and of votes of one model on one suite."""

    def __init__(self, known: KnownAccuracy) -> None:
        self.known = known

    def best_of(self, samples: int, measured_samples: int | None = None) -> PredictedAccuracy:
        """Predict the accuracy of the best of n under a verifier that is always right. `measured_samples`: of every
        problem, from which a measurement of it would be estimated; None: one attempt of n samples."""
        return self._predict(any_correct(samples)[:, None], samples, measured_samples, self._passes, SHAPE_ERROR)

    def vote(self, samples: int, measured_samples: int | None = None) -> PredictedAccuracy:
        """Predict the accuracy of the most frequent answer of n samples."""
        return self.vote_by(win_probabilities(samples), samples, measured_samples)

    def vote_by(self, wins: Floats, samples: int, measured_samples: int | None = None) -> PredictedAccuracy:
        """Predict a vote of up to n samples whose probability to be correct is given: [nodes, leads]."""
        return self._predict(wins, samples, measured_samples, self._votes, VOTE_SHAPE_ERROR)

    def mean_by_vote(self, values: Floats) -> float:
        """Return the mean over problems of a quantity of a vote: [nodes, leads]."""
        return float(self._votes.moments(values, self.known.num_problems)[0] @ self._votes.shares)

    def _predict(
        self, values: Floats, samples: int, measured_samples: int | None, candidates: Candidates, shape_error: float
    ) -> PredictedAccuracy:
        mean, variance, noise = candidates.moments(values, self.known.num_problems)
        mean = np.clip(mean, 0.0, 1.0)
        doublings = max(0.0, math.log2(samples / max(1, self.known.most_samples)))
        shape = shape_error * doublings * 4.0 * mean * (1.0 - mean)
        variance = variance + noise * noise_share(samples, measured_samples or samples) + shape**2
        draws = np.clip(mean[:, None] + np.sqrt(variance)[:, None] * _QUANTILES, 0.0, 1.0).ravel()
        weights = np.repeat(candidates.shares, len(_QUANTILES))
        order = np.argsort(draws)
        cumulated = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
        margin = (1.0 - INTERVAL_LEVEL) / 2
        low, middle, high = np.interp([margin, 0.5, 1.0 - margin], cumulated, draws[order])
        return PredictedAccuracy(float(middle), float(low), float(high))

    @cached_property
    def _passes(self) -> Candidates:
        return pass_candidates(self.known)

    @cached_property
    def _votes(self) -> Candidates:
        return vote_candidates(self.known)
