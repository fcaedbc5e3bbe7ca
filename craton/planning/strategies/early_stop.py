"""Votes that end early: how many samples they need, and how often they are right.

The rule is in `stopping_rule`. Only samples without which it cannot hold are started: a round.

Guarantees: the same numbers at every call; simulated with a fixed seed, with a standard error below 1% of n.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from craton.planning.strategies.problem_mix import NODES, Floats
from craton.planning.strategies.stopping_rule import needed_table
from craton.planning.strategies.votes import COMPETITORS, LEADS, win_probabilities, wrong_shares

_SEED = 24
_EVERY = 3  # node of p is simulated; in between: interpolated
_TRIALS = 100


@dataclass(frozen=True)
class StoppedVotes:
    """Votes of at most n samples, for every node and lead: [nodes, leads]."""

    wins: Floats  # probability to be correct
    samples: Floats  # mean number of samples
    rounds: Floats  # mean number of rounds that wait for each other


@cache
def stopped_votes(most: int, stop: float) -> StoppedVotes:
    """Return votes of at most `most` samples that end at this confidence.

    How often they are right is the exact probability of a full vote, plus the difference between both in a simulation
    of the same samples. A tie goes to the answer that was first.
    """
    generator = np.random.default_rng(_SEED)
    nodes = NODES[::_EVERY]
    needed = needed_table(most, stop)
    shares = np.stack([wrong_shares(float(lead)) for lead in LEADS])  # [leads, competitors]
    of_all = (1.0 - nodes)[:, None, None] * shares
    edges = nodes[:, None, None] + np.concatenate((np.zeros((*of_all.shape[:2], 1)), np.cumsum(of_all, axis=2)), axis=2)
    edges = np.repeat(edges.reshape(-1, COMPETITORS + 1), _TRIALS, axis=0)  # [votes, answers]
    votes = len(edges)
    counts = np.zeros((votes, COMPETITORS + 2), dtype=np.int16)  # correct, competitors, scattered
    leader = np.full(votes, -1)
    first, second = np.zeros(votes, dtype=np.int16), np.zeros(votes, dtype=np.int16)
    ends, is_correct = np.full(votes, most), np.zeros(votes, dtype=bool)
    rows = np.arange(votes)
    rounds, round_end = np.zeros(votes), np.zeros(votes, dtype=int)
    for sample in range(1, most + 1):
        starting = (round_end < sample) & (ends == most)
        left = most - sample + 1
        rounds[starting] += 1
        round_end[starting] = (sample - 1 + np.maximum(needed[left, first, second], 1))[starting]
        answer = (generator.random(votes)[:, None] >= edges).sum(axis=1)
        is_scattered = answer == COMPETITORS + 1  # an answer of its own
        counts[rows, answer] += 1
        count = np.where(is_scattered, 1, counts[rows, answer])
        is_leader = (answer == leader) & ~is_scattered
        second = np.where(is_leader, second, np.where(count > first, first, np.maximum(second, count)))
        leader = np.where(count > first, answer, leader)
        first = np.maximum(first, count)
        ending = (ends == most) & (needed[most - sample, first, second] == 0)
        ends[ending], is_correct[ending] = sample, (leader == 0)[ending]
    full = leader == 0
    ends_early = ends < most
    shape = (len(nodes), len(LEADS), _TRIALS)
    changed = np.where(ends_early, is_correct, full).astype(float) - full
    wins = win_probabilities(most) + _interpolated(changed.reshape(shape).mean(axis=2))
    means = (_interpolated(value.reshape(shape).mean(axis=2)) for value in (ends, rounds))
    return StoppedVotes(np.clip(wins, 0.0, 1.0), *means)


def _interpolated(values: Floats) -> Floats:
    """Return values for every node from those of the simulated ones: [nodes, leads]."""
    positions = np.arange(len(NODES))
    return np.stack([np.interp(positions, positions[::_EVERY], column) for column in values.T], axis=1)
