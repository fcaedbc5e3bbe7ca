"""Strategies as they are written: short texts, mappings, defaults, bounds, and one line for every mistake."""

from __future__ import annotations

from typing import Any

import pytest

from craton.errors import CratonError
from craton.job.document import Section, parse_document, parse_section
from craton.job.errors import ContentError, StrategyError
from craton.job.sections.strategy import (
    BeamStrategy,
    BestOfStrategy,
    BudgetStrategy,
    StrategyBounds,
    StrategySpec,
    TreeStrategy,
    VoteStrategy,
    parse_strategy,
)


class Holder(Section):
    strategy: StrategySpec


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("vote", VoteStrategy(n=16)),
        ("vote:5", VoteStrategy(n=5)),
        ("best_of:8:math", BestOfStrategy(n=8, score="math")),
        ("best_of:8", BestOfStrategy(n=8, score="logprobs")),
        ("beam:2:judge", BeamStrategy(n=2, score="judge")),
        ("tree:32:math", TreeStrategy(n=32, score="math")),
        ("budget:400", BudgetStrategy(at_most=400)),
        ("budget:100-400", BudgetStrategy(at_least=100, at_most=400)),
    ],
)
def test_short_texts(text: str, meant: Section) -> None:
    assert parse_strategy(text) == meant
    assert parse_strategy(meant) is meant


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "vote", "stop": "off"},
        {"kind": "vote", "n": 4, "answer": {"regex": r"answer: (\w+)"}, "max_seconds": "1m"},
        {"kind": "vote", "answer": {"json": "result"}, "max_dollars": 0.01, "max_tokens": 1000},
        {"kind": "tree", "n": 9, "width": 3, "step": {"tokens": 8}, "score": "math"},
        {"kind": "budget", "at_least": 10, "wait": "Hmm", "close": "</thought>"},
    ],
)
def test_a_dumped_strategy_reads_the_same(value: dict[str, Any]) -> None:
    strategy = parse_strategy(value)
    assert parse_strategy(strategy.model_dump(mode="json", exclude_none=True)) == strategy


def test_what_a_strategy_runs_at_the_same_time() -> None:
    assert parse_strategy({"kind": "vote", "stop": False}).model_dump()["stop"] == 0
    assert parse_strategy({"kind": "beam", "n": 3, "width": 5}).num_samples == 15
    assert parse_strategy("tree:2").num_samples == 2
    assert parse_strategy("budget:8").num_samples == 1
    assert (parse_strategy("best_of:2").verifier, parse_strategy("best_of:2:math").verifier) == (None, "math")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"kind": "vote", "n": 0}, "strategy.n: 0 is not a whole number from 1 to 1024"),
        ({"kind": "best_of", "n": 10_000}, "strategy.n: 10000 is not a whole number from 1 to 1024"),
        ("vote:ten", "strategy.n: 'ten' is not a whole number"),
        ("vot:3", "strategy: kind: 'vot' is not a strategy; allowed: vote, best_of, beam, tree, budget; did you mean"),
        ("vote:3:math", "strategy: 'vote:3:math' has too many parts; write vote:N, or a mapping"),
        ("budget:1:2", "strategy: 'budget:1:2' has too many parts; write budget:AT_LEAST-AT_MOST"),
        ({"n": 3}, "strategy: key 'kind' is missing"),
        (3, "strategy: 3 is not a strategy; write e.g. vote:16"),
        ({"kind": "vote", 3: 4}, "key '3' is not known under strategy"),
        ({"kind": "vote", "answers": "text"}, "key 'answers' is not known under strategy"),
        ({"kind": "vote", "answer": "numbr"}, "strategy.answer: 'numbr' is not an answer to count; allowed: last_num"),
        ({"kind": "vote", "answer": {"regex": "("}}, "strategy.answer: '(' is not a regular expression"),
        ({"kind": "vote", "answer": {"kind": "json"}}, "strategy.answer: json needs an argument"),
        ({"kind": "vote", "stop": 0.4}, "strategy.stop: 0.4 is not a confidence"),
        ({"kind": "vote", "max_tokens": 0}, "strategy.max_tokens: 0 is not a whole number"),
        ({"kind": "vote", "max_dollars": 0}, "strategy.max_dollars: 0 is not an amount in dollars"),
        ({"kind": "vote", "strategy": "vote:3"}, "strategy: key 'strategy' holds another strategy, and strategies do"),
        ({"kind": "best_of", "score": {"kind": "vote"}}, "strategy: key 'score' holds another strategy"),
        ({"kind": "best_of", "score": "a/b"}, "strategy.score: 'a/b' is not a score"),
        ({"kind": "best_of", "score": "mth"}, "strategy.score: no verifier is called 'mth'; allowed: logprobs, math; "),
        ({"kind": "beam", "n": 512, "width": 4}, "strategy: n 512 beams with 4 expansions (width) each are 2,048 br"),
        ({"kind": "tree", "n": 2, "width": 3}, "strategy: width 3 expansions of a node are more than the 2"),
        ({"kind": "tree", "step": {}}, "strategy.step: give one of stop and tokens"),
        ({"kind": "tree", "step": {"tokens": 0}}, "strategy.step.tokens: 0 is not a whole number"),
        ({"kind": "budget"}, "strategy: give at_least, at_most or both"),
        ("budget:50-20", "strategy: at_most 20 is below at_least (50)"),
        ({"kind": "budget", "at_least": 9, "max_tokens": 8}, "strategy: max_tokens 8 is below at_least (9)"),
    ],
)
def test_mistakes(value: object, line: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse_strategy(value, scores=["math"])
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, CratonError)


def test_a_mistake_in_a_file_has_its_line() -> None:
    with pytest.raises(ContentError, match=r"^job.yaml:3: strategy.n: 0 is not a whole number"):
        parse_section(Holder, parse_document("strategy:\n  kind: vote\n  n: 0\n"))
    with pytest.raises(ContentError, match=r"at_most 3 is below at_least \(7\).* \(lines 2 and 3\)"):
        parse_section(Holder, parse_document("strategy: {kind: budget,\n at_least: 7,\n at_most: 3}\n"))
    assert parse_section(Holder, parse_document("strategy: vote:3\n")).strategy == VoteStrategy(n=3)


def test_bounds_of_a_server() -> None:
    bounds = StrategyBounds(max_n=8, max_tokens=1000, max_seconds=30.0)
    bounded = bounds.bound(parse_strategy({"kind": "vote", "n": 8, "max_seconds": 5}))
    assert (bounded.max_tokens, bounded.max_seconds) == (1000, 5.0)
    for value, line in [
        ("vote:9", "strategy.n: 9 is above this server's maximum of 8; lower n"),
        ("beam:4:math", "strategy.n: 4 with 16 branches is above this server's maximum of 8"),
        (
            {"kind": "vote", "n": 8, "max_tokens": 1001},
            "strategy.max_tokens: 1001 is above this server's maximum of 1000",
        ),
        ({"kind": "budget", "at_least": 1001}, "strategy.at_least: 1001 is above this server's maximum of 1000 tokens"),
    ]:
        with pytest.raises(StrategyError) as caught:
            bounds.bound(parse_strategy(value))
        assert str(caught.value).startswith(line)
