"""When a vote may end early: the rule that voting follows and that plans of it simulate.

As in Adaptive-Consistency (arXiv:2305.11860), the share p of the leader in the votes for itself (v₁) and the runner-up
(v₂) is Beta(v₁+1, v₂+1) distributed. Voting ends once the leader also leads the vote of all n with probability `stop`.
If the r samples that are left vote for one of these two, X of them for the leader, X is beta-binomial:
P(v₁ + X > v₂ + r - X), with half of a tie, must be at least `stop`.
"""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-12  # of the confidences in the table


def leader_confidence(leader: int, runner_up: int, left: int) -> float:
    """Return the probability that the leader leads after `left` further votes for it or the runner-up."""
    total = 0.0
    for more in range(left + 1):
        lead = leader + more - (runner_up + left - more)
        ways = comb(leader + more, more) * comb(runner_up + left - more, left - more)
        total += ways * (1.0 if lead > 0 else 0.5 if lead == 0 else 0.0)
    return total / comb(leader + runner_up + left + 1, left)


def needed_samples(leader: int, runner_up: int, left: int, stop: float) -> int:
    """Return how many further samples it takes, at least, until voting may end; `left` at most. 0: it ends now.
    `stop` 0: all that are left."""
    if stop == 0:
        return left
    for more in range(left):
        if leader + more > 0 and leader_confidence(leader + more, runner_up, left - more) >= stop:
            return more
    return left


def needed_table(most: int, stop: float) -> NDArray[np.int16]:
    """Return `needed_samples` for every [samples left, leader's votes, runner-up's votes] of a vote of `most`.

    The next of these two votes is the leader's with probability (v₁ + 1) / (v₁ + v₂ + 2), which gives the confidence
    with r samples left from that with r - 1. Entries of more than `most` votes and samples together mean nothing."""
    leader, runner_up = np.meshgrid(np.arange(most + 2), np.arange(most + 2), indexing="ij")
    share = ((leader + 1) / (leader + runner_up + 2))[:-1, :-1]
    confidence = np.where(leader > runner_up, 1.0, np.where(leader == runner_up, 0.5, 0.0))
    needed = np.zeros((most + 1, most + 2, most + 2), np.int16)
    for left in range(1, most + 1):
        confidence[:-1, :-1] = share * confidence[1:, :-1] + (1.0 - share) * confidence[:-1, 1:]
        may_end = (leader > 0) & (confidence >= stop - ROUNDING) & (stop > 0)
        needed[left, :-1] = np.where(may_end[:-1], 0, 1 + needed[left - 1, 1:])
    return needed
