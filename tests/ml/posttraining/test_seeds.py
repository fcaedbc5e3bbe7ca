"""No two (prompt, copy) of a run share noise."""

from __future__ import annotations

import itertools
import random

import pytest

from craton.ml.posttraining.seeds import STRIDE, rollout_seed
from craton.ml.serving.messages import SEEDS, seed_of_copy

GROUP = 64


@pytest.mark.parametrize("seed", [0, 1, 17, 2**63 - 1])
def test_no_two_copies_share_a_seed(seed: int) -> None:
    indices = [*range(1000), *(2**31 + index for index in range(100)), *(2**40 + index for index in range(100))]
    seeds = {seed_of_copy(rollout_seed(seed, index), copy) for index in indices for copy in range(GROUP)}
    assert len(seeds) == len(indices) * GROUP
    assert all(0 <= value < SEEDS for value in seeds)


def test_the_largest_groups_do_not_reach_the_next_prompt() -> None:
    starts = sorted(rollout_seed(3, index) for index in range(20_000))
    assert min(after - before for before, after in itertools.pairwise(starts)) >= STRIDE
    assert max(starts) + STRIDE <= SEEDS


def test_other_seeds_of_a_run_give_other_noise() -> None:
    generator = random.Random(5)
    runs = [generator.randrange(2**62) for _ in range(20)] + list(range(20))
    starts = {rollout_seed(seed, index) for seed in runs for index in range(500)}
    assert len(starts) > 0.999 * len(runs) * 500
    assert rollout_seed(4, 9) == rollout_seed(4, 9)
