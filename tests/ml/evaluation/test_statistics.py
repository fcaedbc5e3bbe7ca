"""Statistics of evaluations against scipy and against counting all cases by hand."""

from __future__ import annotations

from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from craton.ml.evaluation.statistics import (
    accuracy_interval,
    compare_paired,
    majority_at,
    mcnemar_p_value,
    mean_interval,
    pass_at,
    powers_of_two,
    sign_flip_p_value,
    wilson_interval,
)


@pytest.mark.parametrize(("solved", "count"), [(0, 10), (3, 10), (10, 10), (417, 500)])
def test_wilson_interval_is_that_of_scipy(solved: int, count: int) -> None:
    expected = stats.binomtest(solved, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(solved, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert (wilson_interval(solved, count)[1] == 1.0) == (solved == count)


def test_intervals_of_several_samples_resample_problems() -> None:
    shares = np.random.default_rng(1).integers(0, 5, 80) / 4
    expected = stats.bootstrap((shares,), np.mean, method="percentile", n_resamples=10_000, rng=3).confidence_interval
    low, high = accuracy_interval(list(shares), is_single=False)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.006)
    assert (low, high) == mean_interval(list(shares)), "a function of the values"
    # 40 copies of the same ten samples are ten clusters, not 400 samples
    clustered = mean_interval([1.0] * 5 + [0.0] * 5)
    assert clustered[1] - clustered[0] > 0.5
    assert mean_interval([1.0] * 10) == wilson_interval(10, 10)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for right in range(7):
        samples = [True] * right + [False] * (6 - right)
        for k in range(1, 7):
            assert pass_at(6, right, k) == pytest.approx(fmean(any(part) for part in combinations(samples, k)))


def counted_majority(answers: list[str | None], is_right: list[bool], k: int) -> float:
    """The share of subsets whose most frequent answer is right, with ties broken at random."""
    found = []
    for chosen in combinations(range(len(answers)), k):
        votes = [answers[place] for place in chosen if answers[place] is not None]
        most = max(map(votes.count, votes), default=0)
        winners = {vote for vote in votes if votes.count(vote) == most}
        right = {answers[place] for place in range(len(answers)) if is_right[place]}
        found.append(len(winners & right) / len(winners) if winners else 0.0)
    return fmean(found)


def test_majority_at_k_is_exact_over_all_subsets() -> None:
    draw = np.random.default_rng(0)
    for _ in range(12):
        answers = [None if vote == 3 else str(vote) for vote in draw.integers(0, 4, 7)]
        is_right = [answer == "0" for answer in answers]
        for k in range(1, 8):
            assert majority_at(answers, is_right, k) == pytest.approx(counted_majority(answers, is_right, k))
    two_right = majority_at(["1/2", "0.5", "3", "3", "3"], [True, True, False, False, False], 3)
    assert two_right == pytest.approx(counted_majority(["1/2", "0.5", "3", "3", "3"], [True, True, *[False] * 3], 3))


def test_majority_of_many_samples_is_fast_and_near_its_simulation() -> None:
    draw = np.random.default_rng(5)
    answers = [str(vote) for vote in draw.choice(8, 128, p=[0.25, 0.2, *[0.55 / 6] * 6])]
    drawn = [draw.choice(128, 32, replace=False) for _ in range(4000)]
    scores = []
    for places in drawn:
        votes, counts = np.unique([answers[place] for place in places], return_counts=True)
        winners = votes[counts == counts.max()]
        scores.append(float("0" in winners) / len(winners))
    assert majority_at(answers, [answer == "0" for answer in answers], 32) == pytest.approx(fmean(scores), abs=0.025)


def test_mcnemar_is_scipys_binomial_test() -> None:
    for better, worse in product((0, 1, 4, 9), repeat=2):
        expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert mcnemar_p_value(better, worse) == pytest.approx(expected)


def test_sign_flips_are_scipys_permutation_test() -> None:
    draw = np.random.default_rng(2)
    for size in (5, 12):
        differences = draw.integers(-4, 5, size) / 4
        expected = stats.permutation_test(
            (differences, np.zeros(size)), lambda a, b: np.sum(a - b), permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert sign_flip_p_value(differences) == pytest.approx(expected)
    many = draw.normal(0.2, 1.0, 60)
    assert sign_flip_p_value(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)


def test_a_paired_comparison_sees_what_two_intervals_do_not() -> None:
    base = [float(number % 2) for number in range(200)]
    better = [1.0 if number % 10 == 0 else share for number, share in enumerate(base)]
    found = compare_paired(better, base)
    assert (found.test, found.num_better, found.num_worse) == ("mcnemar", 20, 0)
    assert found.difference == pytest.approx(0.1)
    assert found.p_value == pytest.approx(2 / 2**20)
    assert 0 < found.low < 0.1 < found.high
    several = compare_paired([0.5, 0.75, 1.0], [0.5, 0.25, 0.25])
    assert (several.test, several.p_value) == ("sign-flip", 0.5)


def test_sizes_of_subsets() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4, 6]
    assert powers_of_two(8) == [1, 2, 4, 8]
