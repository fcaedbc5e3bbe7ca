"""Accuracy of more samples: the parts against simulations and closed forms, the whole against published tables."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from craton.planning.strategies import (
    LEADS,
    NODES,
    AccuracyCurve,
    KnownAccuracy,
    any_correct,
    needed_samples,
    needed_table,
    stopped_votes,
    win_probabilities,
)
from craton.planning.strategies.problem_mix import beta_weights
from craton.planning.strategies.votes import wrong_shares

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "repeated_sampling.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("first", "second"), [(0.05, 0.3), (0.5, 0.5), (2.0, 5.0), (30.0, 10.0)])
def test_moments_of_a_beta_distribution_on_the_grid_are_exact(first: float, second: float) -> None:
    weights = beta_weights(np.array([first]), np.array([second]))[0]
    total = first + second
    assert weights.sum() == pytest.approx(1.0)
    assert weights @ NODES == pytest.approx(first / total, rel=1e-3)
    assert weights @ NODES**2 == pytest.approx(first * (first + 1) / total / (total + 1), rel=1e-3)
    unsolved = np.prod([(second + k) / (total + k) for k in range(16)])
    assert weights @ any_correct(16) == pytest.approx(1.0 - unsolved, abs=1e-3)


@pytest.mark.parametrize(("p", "lead"), [(0.3, 0.42), (0.2, 0.14), (0.5, 0.78)])
def test_a_vote_wins_as_often_as_in_a_simulation(p: float, lead: float) -> None:
    row, column = int(np.abs(NODES - p).argmin()), int(np.abs(LEADS - lead).argmin())
    p, lead = float(NODES[row]), float(LEADS[column])
    shares = (1.0 - p) * wrong_shares(lead)
    generator = np.random.default_rng(3)
    counts = generator.multinomial(8, [p, *shares, 1.0 - p - shares.sum()], size=40_000)
    correct, wrong, scattered = counts[:, 0], counts[:, 1:-1], counts[:, -1]
    tied = (wrong == correct[:, None]).sum(axis=1) + np.where(correct == 1, scattered, 0)
    wins = np.where((correct == 0) | (wrong.max(axis=1) > correct), 0.0, 1.0 / (1.0 + tied))
    assert win_probabilities(8)[row, column] == pytest.approx(wins.mean(), abs=0.012)


def test_one_and_two_votes_are_right_as_often_as_one_sample() -> None:
    assert np.allclose(win_probabilities(1), NODES[:, None])
    assert np.allclose(win_probabilities(2), NODES[:, None], atol=0.02)


def test_the_table_of_the_stopping_rule_is_the_rule() -> None:
    for stop in (0.0, 0.88, 0.97):
        table = needed_table(9, stop)
        for left in range(10):
            for leader in range(10 - left):
                for runner_up in range(min(leader, 9 - left - leader) + 1):
                    assert table[left, leader, runner_up] == needed_samples(leader, runner_up, left, stop)


def test_an_early_stop_saves_samples_where_answers_agree_and_loses_little() -> None:
    votes = stopped_votes(16, 0.95)
    easy, even = int(np.abs(NODES - 0.95).argmin()), int(np.abs(NODES - 0.45).argmin())
    assert np.all((votes.samples >= 3.0) & (votes.samples <= 16.0)), "three equal votes are the fewest that are certain"
    assert votes.samples[easy].max() < 6.0
    assert votes.samples[even].min() > 9.0
    assert np.abs(votes.wins - win_probabilities(16)).max() < 0.1
    assert np.all(votes.rounds >= 1.0)


def test_counts_of_a_known_mix_predict_what_more_samples_solve() -> None:
    """Four samples of 600 problems from a known distribution; the truth is what 64 samples of each really solve."""
    generator = np.random.default_rng(5)
    inside = 0
    for _ in range(6):
        accuracy = generator.beta(0.6, 0.9, size=600)
        counts = Counter((int(correct), 4) for correct in generator.binomial(4, accuracy))
        curve = AccuracyCurve(KnownAccuracy(600, {1: 0.4}, counts=counts))
        predicted = curve.best_of(64)
        solved = (generator.binomial(64, accuracy) > 0).mean()
        assert predicted.accuracy == pytest.approx(solved, abs=0.06)
        inside += predicted.low <= solved <= predicted.high
    assert inside >= 4


def test_more_knowledge_narrows_the_interval_and_never_leaves_it() -> None:
    one = AccuracyCurve(KnownAccuracy(500, {1: 0.5}, samples=1)).best_of(16)
    two = AccuracyCurve(KnownAccuracy(500, {1: 0.5, 4: 0.7}, samples=4)).best_of(16)
    three = AccuracyCurve(KnownAccuracy(500, {1: 0.5, 4: 0.7, 8: 0.77}, samples=8)).best_of(16)
    widths = [predicted.high - predicted.low for predicted in (one, two, three)]
    assert widths[0] > 2 * widths[1] > 2 * widths[2] > 0
    for predicted in (one, two, three):
        assert 0.0 <= predicted.low <= predicted.accuracy <= predicted.high <= 1.0
    assert AccuracyCurve(KnownAccuracy(500, {1: 0.5, 4: 0.7}, samples=4)).best_of(4, 4).accuracy == pytest.approx(
        0.7, abs=0.015
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_problems_that_are_never_or_always_solved_stay_so(share: float) -> None:
    counts = {(8 if share else 0, 8): 200}
    curve = AccuracyCurve(KnownAccuracy(200, {1: share, 8: share}, counts=counts))
    assert curve.best_of(16).accuracy == pytest.approx(share, abs=0.05)
    assert curve.vote(16).accuracy == pytest.approx(share, abs=0.05)


def test_published_coverage_is_predicted_from_two_numbers_of_samples() -> None:
    """Tables whose numbers share a temperature; of both halves. What the others show: docs/measurements.md."""
    errors, inside = [], []
    for row in PUBLISHED["rows"]:
        source = PUBLISHED["sources"][row["source"]]
        if row["source"] not in ("daft", "limit-of-rlvr"):
            continue
        shares = {int(size): share for size, share in row["pass_at"].items()}
        known = dict(sorted(shares.items())[:2])
        curve = AccuracyCurve(KnownAccuracy(source["problems"], known, samples=source["samples"]))
        for size in sorted(shares)[2:]:
            predicted = curve.best_of(size, source["samples"])
            errors.append(abs(predicted.accuracy - shares[size]))
            inside.append(predicted.low <= shares[size] <= predicted.high)
    assert len(errors) == 20
    assert median(errors) < 0.012
    assert sum(inside) / len(inside) > 0.8


def test_every_published_number_has_a_source_and_a_half() -> None:
    for row in PUBLISHED["rows"]:
        source = PUBLISHED["sources"][row["source"]]
        assert source["half"] in ("fitting", "held_back")
        assert source["address"]
        shares = list(row["pass_at"].values())
        assert shares == sorted(shares)
        assert row.get("problems", source.get("problems"))
