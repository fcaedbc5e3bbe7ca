"""How the accuracy of one sample differs between problems: a beta distribution, plus a share of problems never solved.

    p ~ (1 − zero) · Beta(μν, (1 − μ)ν)        μ: mean accuracy, ν: concentration; small ν: easy or hopeless problems

The mean alone does not say what more samples are worth: at a mean of 50%, four samples solve 94% of equal problems, but
50% where half of the problems are trivial and half impossible.

Guarantees: pure functions; expectations are sums over a fixed grid in the logit of p, whose tails are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Floats = np.ndarray

_REACH = 14.0  # logits of the grid
_STEP = 0.25
LOGITS = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
# Accuracy of a sample at every node. The first node is a problem never solved, the last one always solved.
NODES = np.concatenate(([0.0], 1.0 / (1.0 + np.exp(-LOGITS)), [1.0]))

# Prior of the mixes: of the concentration (mean and standard deviation of its logarithm) and of the share never solved
# (exponential). From the fitting half of data/repeated_sampling.json.
LOG_CONCENTRATION = 0.2
LOG_CONCENTRATION_SPREAD = 1.3
MEAN_ZERO_SHARE = 0.02


@dataclass(frozen=True)
class MixGrid:
    """Candidate mixes, one per row: logit of the mean, logarithm of the concentration, share never solved."""

    mean_logits: Floats
    log_concentrations: Floats
    zero_shares: Floats

    def __len__(self) -> int:
        return len(self.mean_logits)

    @property
    def log_prior(self) -> Floats:
        distance = (self.log_concentrations - LOG_CONCENTRATION) / LOG_CONCENTRATION_SPREAD
        return -0.5 * distance**2 - self.zero_shares / MEAN_ZERO_SHARE

    def take(self, rows: Floats) -> MixGrid:
        return MixGrid(self.mean_logits[rows], self.log_concentrations[rows], self.zero_shares[rows])

    def weights(self) -> Floats:
        """Return the probability of every node: [mixes, nodes]."""
        mean = 1.0 / (1.0 + np.exp(-self.mean_logits))
        concentration = np.exp(self.log_concentrations)
        weights = beta_weights(mean * concentration, (1.0 - mean) * concentration)
        weights *= (1.0 - self.zero_shares)[:, None]
        weights[:, 0] += self.zero_shares
        return weights


def beta_weights(first: Floats, second: Floats) -> Floats:
    """Return the probability of every node under Beta(first, second): [distributions, nodes].

    In the logit x of p the density is p^first (1 − p)^second / B, smooth, and exp(first · x) in the lower tail.
    """
    a, b = first[:, None], second[:, None]
    log_p, log_q = -np.log1p(np.exp(-LOGITS)), -np.log1p(np.exp(LOGITS))
    density = a * log_p + b * log_q
    # What lies beyond the first and the last node, with half a step that the sum over nodes does not hold.
    edge = _REACH + _STEP / 2
    lower, upper = -a * edge - np.log(a * _STEP), -b * edge - np.log(b * _STEP)
    logarithms = np.concatenate((lower, density, upper), axis=1)
    weights = np.exp(logarithms - logarithms.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def lattice(low: Floats, high: Floats, points: tuple[int, int, int]) -> MixGrid:
    """Return all combinations of evenly spaced values in a box: logit of the mean, logarithm of ν, zero share."""
    axes = [np.linspace(low[axis], high[axis], points[axis]) for axis in range(3)]
    means, concentrations, zeros = (values.ravel() for values in np.meshgrid(*axes, indexing="ij"))
    return MixGrid(means, concentrations, zeros)


def any_correct(samples: int) -> Floats:
    """Return the probability that one of so many samples is correct, for every node: pass@n."""
    return np.asarray(1.0 - (1.0 - NODES) ** samples)
