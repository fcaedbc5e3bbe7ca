"""Beam and tree search: which branches are taken, what the engine computes for them, and budgets of thought."""

from __future__ import annotations

from typing import Any

import pytest
from strategy_runs import Strategies, texts_of
from test_best_of import vowels

from craton.ml.serving.strategies import Limits


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "beam", "n": 2, "width": 3, "depth": 4, "step": {"tokens": 5}, "score": "vowels"},
        {"kind": "tree", "n": 15, "width": 3, "depth": 4, "step": {"tokens": 5}, "score": "vowels"},
        {"kind": "tree", "n": 12, "width": 4, "depth": 3, "step": {"stop": "e"}, "score": "vowels"},
        {"kind": "beam", "n": 2, "width": 2, "depth": 3, "step": {"tokens": 4}},
    ],
)
def test_a_search_is_repeatable_and_its_answer_is_a_path(strategies: Strategies, strategy: dict[str, object]) -> None:
    first = strategies.run(strategy, vowels, max_tokens=20)
    again = strategies.run(strategy, vowels, max_tokens=20)
    assert (first.text, first.tokens, first.report) == (again.text, again.tokens, again.report)
    assert first.usage == again.usage
    assert first.text in texts_of(first)
    assert len(first.tokens) <= 20
    assert first.usage.completion_tokens > first.usage.chosen_tokens == len(first.tokens)
    assert first.report["branches"] <= (16 if strategy["kind"] == "tree" else 1 + 6 + 3 * 6)
    ended = [sample.score for sample in first.samples if sample.finish is not None]
    chosen = next(sample for sample in first.samples if sample.tokens == first.tokens)
    assert chosen.score == max(score for score in ended if score is not None)


def test_penalties_count_the_branch_as_generated(strategies: Strategies) -> None:
    strategy = {"kind": "beam", "n": 1, "width": 1, "depth": 9, "step": {"tokens": 4}, "score": "vowels"}
    penalty: dict[str, Any] = {"frequency_penalty": 1.5, "temperature": 0.0, "max_tokens": 16}
    searched = strategies.run(strategy, vowels, **penalty)
    assert searched.tokens == strategies.run("vote:1", **penalty).tokens


def test_the_engine_computes_each_token_of_a_tree_once(strategies: Strategies) -> None:
    engine, prompt = strategies.engine, [7] * 40
    strategy = {"kind": "tree", "n": 24, "width": 4, "depth": 5, "step": {"tokens": 10}, "score": "vowels"}
    before = engine.stats().step_tokens
    outcome = strategies.run(strategy, vowels, prompt=prompt, max_tokens=60, ignore_eos=True)
    computed = engine.stats().step_tokens - before
    assert outcome.report["depth"] > 1
    assert computed <= 1.05 * (len(prompt) + outcome.usage.completion_tokens)


def test_a_finished_branch_above_all_others_ends_the_tree(strategies: Strategies) -> None:
    strategy = {"kind": "tree", "n": 200, "width": 8, "depth": 5, "step": {"tokens": 6}, "score": "ends"}
    outcome = strategies.run(strategy, lambda text: float(len(text) > 20), max_tokens=12)
    assert outcome.report["finished"] > 0
    assert outcome.report["branches"] < 200


def test_a_limit_ends_a_search_with_what_it_has(strategies: Strategies) -> None:
    strategy = {"kind": "beam", "n": 2, "width": 2, "depth": 5, "step": {"tokens": 6}, "score": "vowels"}
    outcome = strategies.run(strategy, vowels, Limits(tokens=31), max_tokens=40, ignore_eos=True)
    assert outcome.limited_by == "tokens"
    assert outcome.usage.completion_tokens <= 31
    assert outcome.text in texts_of(outcome)
    assert outcome.text


@pytest.mark.parametrize(("at_least", "at_most"), [(0, 9), (30, 30), (20, None)])
def test_a_budget_is_kept_exactly(strategies: Strategies, at_least: int, at_most: int | None) -> None:
    strategy = {"kind": "budget", "at_least": at_least, "close": "w", "wait": " hello"}
    strategy |= {"at_most": at_most} if at_most is not None else {}
    for seed in range(2):
        outcome = strategies.run(strategy, max_tokens=40, seed=seed)
        thoughts = outcome.report["thinking_tokens"]
        assert at_least <= thoughts <= (at_most or 40)
        assert outcome.report["closed"] == (thoughts == (at_most or 40))
        assert thoughts + len(outcome.tokens) <= 40
        assert outcome.reasoning is not None
        assert "w" not in outcome.reasoning.replace(" hello", "")
        assert outcome.reasoning.count(" hello") >= outcome.report["waits"] - 1
