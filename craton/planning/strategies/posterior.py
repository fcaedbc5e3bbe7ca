"""The posterior over mixes of problems (`problem_mix`) and over how far wrong answers agree (`votes`).

A candidate is a mix and a mean lead of wrong answers. Shares that were observed are normally distributed around what a
candidate expects, with the covariance that so many problems and the noise of sampling give; correct samples of every
problem are counted exactly. What is predicted is conditioned on what was observed, because the problems are the same.

Guarantees: deterministic, without sampling; every candidate has a positive share, and the shares sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from craton.planning.strategies.problem_mix import NODES, Floats, MixGrid, any_correct, lattice
from craton.planning.strategies.votes import LEADS, lead_weights, win_probabilities

ROUNDING = 0.0005  # of a published share: half a unit of its third digit
# How far wrong answers agree where no vote was counted: logit of the share of the leading wrong answer among wrong
# samples of a problem that is solved half of the time, and its spread between models and suites.
LEAD_LOGIT = -1.4
LEAD_LOGIT_SPREAD = 1.3

# Logit of the mean, logarithm of the concentration, share never solved, lead in spreads from its prior.
_FIRST_LOW = np.array([-7.0, -3.0, 0.0, -2.5])
_FIRST_HIGH = np.array([7.0, 4.0, 0.4, 2.5])
_POINTS = (11, 11, 5, 9)
# A box holds what is at most so many nats less likely than the best; on the coarse first lattices the best is far off.
_KEPT_NATS = (12000.0, 1200.0, 120.0, 12.0, 12.0, 12.0)
_CANDIDATES = 96


@dataclass(frozen=True)
class KnownAccuracy:
    """What is known about samples of one model on `num_problems` problems."""

    num_problems: int
    pass_at: Mapping[int, float] = field(default_factory=dict)  # samples → share of problems with a correct one
    majority_at: Mapping[int, float] = field(default_factory=dict)  # samples → share of problems that a vote solves
    samples: int | None = None  # of every problem, from which the shares were estimated; None: each share from its own
    counts: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (correct, samples) → number of problems

    @property
    def most_samples(self) -> int:
        """Return the largest number of samples about which something is known."""
        return max((*self.pass_at, *(samples for _, samples in self.counts)), default=0)


@dataclass(frozen=True)
class Candidates:
    """Candidates with their posterior shares, and the values that were observed of the same problems."""

    shares: Floats  # [candidates]
    groups: Floats  # mix of problems with the same count of correct samples: [candidates, groups, nodes]
    group_shares: Floats  # [groups]
    leads: Floats  # for every node: [candidates, nodes, leads]
    known: Floats  # what was observed, for every node and lead: [known, nodes, leads]
    inverse: Floats  # of its covariance: [candidates, known, known]
    weighted: Floats  # inverse · (observed − expected): [candidates, known]

    def moments(self, values: Floats, num_problems: int) -> tuple[Floats, Floats, Floats]:
        """Return mean, variance over problems, and the noise of one attempt of each problem: [candidates] each.

        `values`: probability or quantity for every node and lead.
        """
        mean, second = self._mean(values), self._mean(values**2)
        groups = self._by_group(values)
        variance = (second - (groups**2) @ self.group_shares) / num_problems
        noise = np.maximum(0.0, mean - second) / num_problems
        if len(self.known):
            expected = np.stack([self._by_group(entry) for entry in self.known], axis=2)  # [candidates, groups, known]
            products = np.stack([self._mean(entry * values) for entry in self.known], axis=1)
            covariance = products - np.einsum("cg,cgk,g->ck", groups, expected, self.group_shares, optimize=True)
            covariance /= num_problems
            mean = mean + (covariance * self.weighted).sum(axis=1)
            variance = variance - np.einsum("ck,ckj,cj->c", covariance, self.inverse, covariance, optimize=True)
        return mean, np.maximum(variance, 0.0), noise

    def _by_group(self, values: Floats) -> Floats:
        by_node = np.einsum("cnl,nl->cn", self.leads, values)
        return np.asarray(np.einsum("cgn,cn->cg", self.groups, by_node, optimize=True))

    def _mean(self, values: Floats) -> Floats:
        return np.asarray(self._by_group(values) @ self.group_shares)


def pass_candidates(known: KnownAccuracy) -> Candidates:
    """Return mixes of problems; how wrong answers agree does not matter to pass@n."""
    return _candidates(known, with_votes=False)


def vote_candidates(known: KnownAccuracy) -> Candidates:
    """Return mixes of problems with leads of wrong answers, from pass@n and from the votes that were counted."""
    return _candidates(known, with_votes=True)


def _candidates(known: KnownAccuracy, with_votes: bool) -> Candidates:
    observed = _Observed.of(known, with_votes)
    low, high = _FIRST_LOW, _FIRST_HIGH
    for kept in _KEPT_NATS:
        grid = lattice(low[:3], high[:3], _POINTS[:3])
        spreads = np.linspace(low[3], high[3], _POINTS[3]) if with_votes else np.zeros(1)
        leads = lead_weights(LEAD_LOGIT + LEAD_LOGIT_SPREAD * spreads) if with_votes else np.ones((1, len(NODES), 1))
        # Without votes the likelihood is that of pass@n, whatever the leads.
        likelihood = observed.log_likelihood(grid, leads if observed.has_votes else leads[:1])
        fit = grid.log_prior[:, None] - 0.5 * spreads**2 + likelihood  # [mixes, leads]
        rows, columns = np.nonzero(fit > fit.max() - kept)
        likely = (grid.mean_logits[rows], grid.log_concentrations[rows], grid.zero_shares[rows], spreads[columns])
        step = (high - low) / (np.array(_POINTS) - 1)
        low = np.maximum(_FIRST_LOW, np.array([axis.min() for axis in likely]) - step)
        high = np.minimum(_FIRST_HIGH, np.array([axis.max() for axis in likely]) + step)
    chosen, shares = _systematic(np.exp(fit - fit.max()).ravel(), _CANDIDATES)
    rows, columns = np.unravel_index(chosen, fit.shape)
    return observed.candidates(grid.take(rows), leads[columns], shares)


@dataclass(frozen=True)
class _Observed:
    """The shares that were observed, and their probability for every node and lead."""

    known: KnownAccuracy
    sizes: list[int]  # of pass@n in ascending order, then of votes
    num_passes: int
    shares: Floats  # [observed]
    values: Floats  # [observed, nodes, leads]

    @classmethod
    def of(cls, known: KnownAccuracy, with_votes: bool) -> _Observed:
        passes = [] if known.counts else sorted(known.pass_at)
        votes = [size for size in sorted(known.majority_at) if size > 2] if with_votes else []
        width = len(LEADS) if with_votes else 1
        values = [np.repeat(any_correct(size)[:, None], width, axis=1) for size in passes]
        values += [win_probabilities(size) for size in votes]
        shares = [known.pass_at[size] for size in passes] + [known.majority_at[size] for size in votes]
        return cls(
            known, passes + votes, len(passes), np.array(shares), np.array(values).reshape(-1, len(NODES), width)
        )

    @property
    def has_votes(self) -> bool:
        return len(self.sizes) > self.num_passes

    def log_likelihood(self, mixes: MixGrid, leads: Floats) -> Floats:
        """Return the logarithm of the likelihood of everything known: [mixes, leads]."""
        weights = mixes.weights()
        result = np.zeros((len(mixes), len(leads)))
        if self.known.counts:
            chances = np.stack([_chance(correct, samples) for correct, samples in self.known.counts], axis=1)
            problems = np.array(list(self.known.counts.values()), dtype=float)
            result += (np.log(np.maximum(weights @ chances, 1e-300)) @ problems)[:, None]
        if len(self.sizes):
            groups, group_shares = _grouped(weights, self.known)
            expected, covariance = self._moments(groups, group_shares, leads)
            difference = self.shares - expected
            solved = np.linalg.solve(covariance, difference[..., None])[..., 0]
            result -= 0.5 * (difference * solved).sum(axis=-1) + 0.5 * np.linalg.slogdet(covariance)[1]
        return result

    def candidates(self, mixes: MixGrid, leads: Floats, shares: Floats) -> Candidates:
        """Return candidates, one per mix and lead, with what was observed of the same problems."""
        groups, group_shares = _grouped(mixes.weights(), self.known)
        inverse, weighted = np.zeros((len(mixes), 0, 0)), np.zeros((len(mixes), 0))
        if len(self.sizes):
            found = [self._moments(groups[[row]], group_shares, leads[[row]]) for row in range(len(mixes))]
            inverse = np.linalg.inv(np.concatenate([covariance[0] for _, covariance in found]))
            expected = np.concatenate([mean[0] for mean, _ in found])
            weighted = np.einsum("ckj,cj->ck", inverse, self.shares - expected)
        return Candidates(shares, groups, group_shares, leads, self.values, inverse, weighted)

    def _moments(self, groups: Floats, group_shares: Floats, leads: Floats) -> tuple[Floats, Floats]:
        """Return what is expected of the observed shares, and their covariance over problems and noise, for every mix
        with every lead: [mixes, leads, observed] and [mixes, leads, observed, observed]."""
        known, count = self.known, len(self.sizes)
        by_node = np.einsum("lni,kni->lkn", leads, self.values, optimize=True)
        products = np.einsum("lni,kni,jni->lkjn", leads, self.values, self.values, optimize=True)
        means = np.einsum("mgn,lkn->mlgk", groups, by_node, optimize=True)
        mixes = np.einsum("mgn,g->mn", groups, group_shares)
        second = (mixes @ products.reshape(-1, len(NODES)).T).reshape(len(groups), len(leads), count, count)
        expected = np.einsum("mlgk,g->mlk", means, group_shares)
        first = np.einsum("mlgk,mlgj,g->mlkj", means, means, group_shares, optimize=True)
        # Noise of sampling. Estimates of pass@n come from the same samples: if a few have a correct one, so have more.
        # Votes are close to, but not nested in each other: their noise is counted as independent.
        index = np.arange(count)
        both_passes = np.logical_and.outer(index < self.num_passes, index < self.num_passes)
        noise_shares = np.sqrt([noise_share(size, known.samples) for size in self.sizes])
        scale = np.outer(noise_shares, noise_shares) * (both_passes | np.eye(count, dtype=bool))
        noise = np.maximum(0.0, expected[..., np.minimum.outer(index, index)] - second) * scale
        covariance = (second - first + noise) / known.num_problems
        return expected, covariance + ROUNDING**2 * np.eye(count)


def noise_share(size: int, samples: int | None) -> float:
    """Return the noise of an estimate from `samples` per problem, relative to one attempt of `size` samples."""
    return min(1.0, size / samples) if samples else 1.0


def _grouped(weights: Floats, known: KnownAccuracy) -> tuple[Floats, Floats]:
    """Return the mix of problems with the same count: [mixes, groups, nodes], and the share of problems per group."""
    if not known.counts:
        return weights[:, None, :], np.ones(1)
    chances = np.stack([_chance(correct, samples) for correct, samples in known.counts])  # [groups, nodes]
    joint = weights[:, None, :] * chances[None]
    problems = np.array(list(known.counts.values()), dtype=float)
    return joint / np.maximum(joint.sum(axis=2, keepdims=True), 1e-300), problems / problems.sum()


@cache
def _chance(correct: int, samples: int) -> Floats:
    """Return the probability of so many correct samples, for every node."""
    ways = math.lgamma(samples + 1) - math.lgamma(correct + 1) - math.lgamma(samples - correct + 1)
    return np.asarray(np.exp(ways) * NODES**correct * (1.0 - NODES) ** (samples - correct))


def _systematic(weights: Floats, number: int) -> tuple[Floats, Floats]:
    """Return rows drawn at even distances of the cumulated weights, and the share of each."""
    cumulated = np.cumsum(weights) / weights.sum()
    rows = np.searchsorted(cumulated, (np.arange(number) + 0.5) / number)
    rows, times = np.unique(rows, return_counts=True)
    return rows, times / number
