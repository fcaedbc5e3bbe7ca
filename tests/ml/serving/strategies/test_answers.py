"""What is counted of a completion: equal answers are equal texts, and a pattern cannot hang the vote."""

from __future__ import annotations

import pytest

from craton.job.sections.strategy import AnswerRule
from craton.ml.serving.strategies import counted_answer


def number(text: str) -> str | None:
    return counted_answer(text, AnswerRule(kind="last_number"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 4.", "4"),
        ("first 3, then 1,024", "1024"),
        ("x = 1024.0", "1024"),
        ("-0.50", "-0.5"),
        ("1e3 apples", "1000"),
        ("-0", "0"),
        ("$12.", "12"),
        ("nothing", None),
        ("", None),
        ("9" * 300, "9" * 300),
        ("1e999999999", "1e999999999"),
    ],
)
def test_the_last_number(text: str, found: str | None) -> None:
    assert number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and \boxed{\frac{1}{2}} end", r"\frac{1}{2}"),
        (r"\boxed {1,000}", "1000"),
        (r"\boxed{3} but \boxed{4", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed{3}", None),
        (r"\boxed{ }", None),
    ],
)
def test_the_last_box_with_balanced_braces(text: str, found: str | None) -> None:
    assert counted_answer(text, AnswerRule(kind="boxed")) == found


def test_patterns_fields_and_texts() -> None:
    pattern = AnswerRule(kind="regex", argument=r"answer: (\w+)")
    assert counted_answer("answer: a\nanswer:  b\nanswer: c", pattern) == "c"
    assert counted_answer("none", pattern) is None
    field = AnswerRule(kind="json", argument="result.value")
    assert counted_answer('{"result": {"value": 3.0}}', field) == "3"
    assert counted_answer('Here:\n```json\n{"result": {"value": " a  b "}}\n```', field) == "a b"
    assert counted_answer('so {"result": {"value": [1]}} it is', field) == "[1]"
    assert counted_answer('{"result": 3}', field) is None
    assert counted_answer("[" * 100_000, field) is None
    assert counted_answer(" two\n words ", AnswerRule(kind="text")) == "two words"


def test_a_pattern_that_would_search_for_ever_finds_nothing() -> None:
    assert counted_answer("a" * 64 + "b", AnswerRule(kind="regex", argument=r"^(a|aa|a?)+$")) is None
