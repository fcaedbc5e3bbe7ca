"""Voting: its rule against an independent computation, which samples it starts, and that order does not matter."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from scipy.stats import betabinom
from strategy_runs import Strategies, texts_of

from craton.ml.serving.clients import Answer
from craton.ml.serving.strategies import samples
from craton.planning.strategies import leader_confidence, needed_samples

LETTER = {"regex": "([a-zA-Z])[^a-zA-Z]*$"}  # the last letter: random models agree now and then


@pytest.mark.parametrize(("leader", "runner_up", "left"), [(0, 0, 3), (3, 0, 13), (9, 7, 1), (300, 280, 90)])
def test_the_confidence_is_the_posterior_of_leading_all_votes(leader: int, runner_up: int, left: int) -> None:
    votes = betabinom(left, leader + 1, runner_up + 1)
    expected = sum(
        votes.pmf(more) * (1.0 if 2 * more > left + runner_up - leader else 0.5)
        for more in range(left + 1)
        if 2 * more >= left + runner_up - leader
    )
    assert leader_confidence(leader, runner_up, left) == pytest.approx(expected)


def test_no_sample_is_started_that_the_rule_does_not_need() -> None:
    assert needed_samples(0, 0, 16, 0.88) == 2
    assert needed_samples(2, 0, 14, 0.88) == 0
    assert needed_samples(2, 1, 13, 0.88) == 2
    assert needed_samples(7, 6, 3, 0.99) == 2  # 9 to 6 with one left is certain
    assert needed_samples(0, 0, 5, 0.0) == 5
    draw = random.Random(1)
    for _ in range(300):  # a schedule never gets beyond the sample at which the rule ends the vote
        votes, started, at = {"a": 0, "b": 0, "c": 0}, 0, 0
        while more := needed_samples(sorted(votes.values())[2], sorted(votes.values())[1], 16 - at, 0.9):
            started = max(started, at + more)
            votes[draw.choice("aaabc")] += 1
            at += 1
        assert started == at


def test_an_early_stop_counts_the_first_samples_of_the_full_vote(strategies: Strategies) -> None:
    full = strategies.run({"kind": "vote", "n": 16, "answer": LETTER, "stop": "off"})
    early = strategies.run({"kind": "vote", "n": 16, "answer": LETTER, "stop": 0.6})
    assert len(full.samples) == 16
    assert 1 <= len(early.samples) < 16
    assert early.report["stopped_early"]
    assert early.report["confidence"] >= 0.6
    assert texts_of(early) == texts_of(full)[: len(early.samples)]
    assert early.usage.completion_tokens == early.usage.chosen_tokens + early.usage.discarded_tokens
    assert early.usage.completion_tokens < full.usage.completion_tokens
    for outcome in (full, early):
        winner = outcome.report["answer"]
        assert outcome.report["votes"][winner] == max(outcome.report["votes"].values())
        assert outcome.text == next(sample.text for sample in outcome.samples if sample.counted == winner)


def test_equal_seeds_give_equal_results_in_any_order_of_ends(
    strategies: Strategies, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = {"kind": "vote", "n": 8, "answer": LETTER, "stop": 0.8}
    lengths: dict[str, Any] = {"min_tokens": 0, "max_tokens": 10}
    usual = strategies.run(strategy, **lengths)
    plain = samples._read
    draw = random.Random(5)

    async def late(answer: Answer) -> None:
        """An end that is noticed later, by a random number of turns of the event loop."""
        await plain(answer)
        for _ in range(draw.randrange(40)):
            await asyncio.sleep(0)

    monkeypatch.setattr(samples, "_read", late)
    for _ in range(2):
        again = strategies.run(strategy, **lengths)
        assert (again.text, texts_of(again), again.report) == (usual.text, texts_of(usual), usual.report)
        assert again.usage == usual.usage
    other = strategies.run(strategy, seed=99, **lengths)
    assert texts_of(other) != texts_of(usual)


def test_samples_without_an_answer_are_no_votes(strategies: Strategies) -> None:
    outcome = strategies.run({"kind": "vote", "n": 4, "answer": {"regex": "no such text (x+)y{9}"}})
    assert (outcome.report["answer"], outcome.report["without_answer"]) == (None, 4)
    assert outcome.text == outcome.samples[0].text
