"""When a vote finds the correct answer: exactly, by the share of the correct answer and of the wrong answers.

Wrong answers compete by a geometric law: of all wrong samples the share λ gives the leading wrong answer, λ(1 − λ) the
next, λ(1 − λ)² the third, and so on; what is left after `COMPETITORS` answers is scattered and never wins. λ near 1:
all mistakes are the same mistake; λ near 0: every mistake is different. Ties are broken at random.

Guarantees: pure, without sampling.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from craton.planning.strategies.problem_mix import LOGITS, NODES, Floats

COMPETITORS = 8
_TIE_NODES = (0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12))  # of Gauss and Legendre
LEADS = np.array([0.02, 0.06, 0.14, 0.26, 0.42, 0.6, 0.78, 0.95])  # nodes of λ
# How λ varies between problems: with the logit of p, and by a beta distribution of this concentration. Chosen on the
# fitting half of data/repeated_sampling.json.
LEAD_SLOPE = 0.6
LEAD_CONCENTRATION = 20.0
MAX_VOTES = 128  # samples of a planned vote


def wrong_shares(lead: float) -> Floats:
    """Return the shares of the competing wrong answers among wrong samples."""
    return np.asarray(lead * (1.0 - lead) ** np.arange(COMPETITORS))


@cache
def win_probabilities(samples: int) -> Floats:
    """Return the probability that a vote of so many samples finds the correct answer: [nodes, leads]."""
    if samples == 1:
        return np.repeat(NODES[:, None], len(LEADS), axis=1)
    wins = np.stack([_wins_by_count(samples, float(lead)) for lead in LEADS], axis=1)  # [correct samples, leads]
    return np.asarray(_binomial(samples) @ wins)


def _wins_by_count(samples: int, lead: float) -> Floats:
    """Return, for every number of correct samples, the probability that the vote finds the correct answer.

    With T wrong answers of as many samples as the correct one it wins 1 / (1 + T) of the ties: the integral of s^T over
    s from 0 to 1, by two nodes that are exact up to T = 3. Counts of a multinomial are independent Poisson counts of
    any rate, given their sum; here of rate `samples`.
    """
    counts = np.arange(samples + 1)
    log_factorials = np.array([math.lgamma(count + 1) for count in counts])

    def poisson(rate: float) -> Floats:
        if rate <= 0.0:
            return np.asarray(counts == 0, dtype=float)
        return np.asarray(np.exp(counts * math.log(rate) - rate - log_factorials))

    shares = wrong_shares(lead)
    scattered = poisson(samples * max(0.0, 1.0 - float(shares.sum())))
    result = np.zeros(samples + 1)
    for tie in _TIE_NODES:
        # Of answers so far, for every number of correct samples and of wrong samples: [correct, wrong].
        total = np.tile(scattered, (samples + 1, 1))
        total[1] *= tie**counts  # scattered answers have one sample each
        for rate in samples * shares:
            terms = poisson(rate)
            largest = min(samples, math.ceil(rate + 8.0 * math.sqrt(rate) + 12.0))  # beyond it: below 1e-12
            summed = np.zeros_like(total)
            for count in range(largest + 1):
                added = terms[count] * total[count:, : samples + 1 - count]
                added[0] *= tie
                summed[count:, count:] += added
            total = summed
        wins = total / poisson(samples)
        result += wins[counts, samples - counts] / len(_TIE_NODES)
    result[0] = 0.0
    return np.asarray(np.clip(result, 0.0, 1.0))


def _binomial(samples: int) -> Floats:
    """Return P(so many of the samples are correct): [nodes, correct samples]."""
    counts = np.arange(samples + 1)
    ways = np.array([math.lgamma(samples + 1) - math.lgamma(k + 1) - math.lgamma(samples - k + 1) for k in counts])
    log_p, log_q = -np.log1p(np.exp(-LOGITS)), -np.log1p(np.exp(LOGITS))
    inner = np.exp(ways + log_p[:, None] * counts + log_q[:, None] * (samples - counts))
    never, always = (counts == 0).astype(float), (counts == samples).astype(float)
    return np.concatenate((never[None], inner, always[None]))


def lead_weights(logits: Floats) -> Floats:
    """Return the probability of every node of λ for every node of p: [logits, nodes, leads].

    `logits`: of the mean λ of a problem that is solved half of the time. Where the correct answer is rare, a wrong one
    is frequent: the mean's logit falls with that of p.
    """
    of_nodes = np.concatenate((LOGITS[:1], LOGITS, LOGITS[-1:])).clip(-6.0, 6.0)
    means = 1.0 / (1.0 + np.exp(LEAD_SLOPE * of_nodes - logits[:, None]))[..., None]
    edges = np.concatenate(([0.0], (LEADS[1:] + LEADS[:-1]) / 2, [1.0]))
    density = (means * LEAD_CONCENTRATION - 1.0) * np.log(LEADS)
    density = density + ((1.0 - means) * LEAD_CONCENTRATION - 1.0) * np.log1p(-LEADS) + np.log(np.diff(edges))
    weights = np.exp(density - density.max(axis=2, keepdims=True))
    return np.asarray(weights / weights.sum(axis=2, keepdims=True))
