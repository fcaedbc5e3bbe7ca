"""Verifiers that compare a completion with the answer of its row, as functions; and expressions in the pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from verifier_pools import needs_isolation, open_pool, sample

from craton.ml.verifiers import VerifierPool
from craton.ml.verifiers.answers import UnreadableReferenceError, exact, json_schema, regex
from craton.ml.verifiers.programs import program_of, program_test
from craton.ml.verifiers.rewards import RewardValueError, as_reward

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("42", "42", 1.0),
        (" 42\n", 42, 1.0),
        ("42.", "42", 0.0),
        ("", "", 1.0),
        ("[1, 2]", [1, 2], 1.0),
        ("é", "é", 1.0),
    ],
)
def test_exact_ignores_white_space_around(completion: str, answer: object, value: float) -> None:
    assert exact(completion, answer, {}) == value


def test_regex_searches_the_rows_pattern_or_its_own() -> None:
    assert regex("the answer is 12", r"is \d+$", {}) == 1.0
    assert regex("the answer", r"is \d+$", {}) == 0.0
    assert regex("<think>x</think> 4", None, {"pattern": r"(?s)^<think>.*</think>"}) == 1.0
    with pytest.raises(UnreadableReferenceError, match="not a regular expression"):
        regex("x", "[", {})


def test_regex_with_pattern_and_field_compares_the_last_match() -> None:
    pattern = {"pattern": r"answer: (\w+)"}
    assert regex("answer: 3, no, answer: 4", "4", pattern) == 1.0
    assert regex("answer: 4, no, answer: 3", "4", pattern) == 0.0
    assert regex("four", "4", pattern) == 0.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"a": 1}', 1.0),
        ('Here it is:\n```json\n{"a": 1}\n```', 1.0),
        ('{"a": "1"}', 0.0),
        ("{", 0.0),
        ('{"a": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema(completion: str, value: float) -> None:
    assert json_schema(completion, SCHEMA, {}) == value
    assert json_schema(completion, None, {"json_schema": SCHEMA}) == value


@pytest.mark.parametrize("schema", ["{", {"type": "nothing"}, 3, {"$ref": "https://example.org/schema.json"}])
def test_a_schema_that_cannot_be_read_gives_no_verdict(schema: object) -> None:
    with pytest.raises(UnreadableReferenceError):
        json_schema('{"a": 1}', schema, {})


def test_the_program_is_the_last_block() -> None:
    assert program_of("```python\na = 1\n```\nbetter:\n```py\nb = 1\n```\ndone") == "b = 1\n"
    assert program_of("c = 1") == "c = 1"
    assert program_of("```python\ncut = 1\n") == "cut = 1\n"


def test_expected_outputs_stay_outside() -> None:
    test = program_test("print(2)", [{"input": "1\n", "output": "expected 2\n"}])
    assert b"expected" not in test.request + test.follow_up
    assert test.value({"outputs": ["expected 2  \n\n"]}) == 1.0
    assert test.value({"outputs": ["3"]}) == test.value({"outputs": []}) == test.value({"ended": 0}) == 0.0


def test_a_reply_needs_what_was_sent_with_the_tests() -> None:
    test = program_test("x = 1", ["assert x == 1"])
    assert b"assert" not in test.request
    assert test.nonce.encode() not in test.request
    assert test.value({"passed": test.nonce}) == 1.0
    assert test.value({"passed": True}) == test.value({"passed": program_test("x", "y").nonce}) == 0.0


@pytest.mark.parametrize("tests", [None, [], 3, "", [{"input": 1}], ["assert f()", {"input": "", "output": ""}]])
def test_tests_that_cannot_be_read_give_no_verdict(tests: object) -> None:
    with pytest.raises(UnreadableReferenceError, match="no test of a program"):
        program_test("x", tests)


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "returned nan"), ("1", r"returned '1' \(str\)"), (None, "returned nothing"), ([1.0], "list")],
)
def test_a_value_that_is_no_reward(value: object, message: str) -> None:
    with pytest.raises(RewardValueError, match=f"my.rewards:score returned.*{message.split()[-1]}.*finite number"):
        as_reward(value, "my.rewards:score")


@pytest.fixture(scope="module")
def expressions() -> Iterator[VerifierPool]:
    with open_pool({"verifier": "math"}) as pool:
        yield pool


@needs_isolation
@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0),
        ("0.5", r"$\frac{1}{3}$", 0.0),
        ("72", "#### 72", 1.0),
        ("x^2 + 2x + 1", r"$(x+1)^2$", 1.0),
        (r"\{1, 2\}", r"$\{2, 1\}$", 1.0),
        ("(1, 2)", r"$(2, 1)$", 0.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        ("12", "I do not know", 0.0),
        (r"\boxed{7}", "", 0.0),
    ],
)
def test_math(expressions: VerifierPool, answer: str, completion: str, value: float) -> None:
    (verdict,) = expressions.verify([sample(completion, answer=answer)])
    assert (verdict.reward, verdict.error) == (value, "")


@needs_isolation
def test_an_answer_that_math_cannot_parse_gives_no_verdict(expressions: VerifierPool) -> None:
    for row in ({"answer": ""}, {"answer": "["}, {}, {"answer": None}):
        (verdict,) = expressions.verify([sample("1", **row)])
        assert verdict.reward is None
        assert verdict.error.startswith("math: ")


@needs_isolation
def test_expressions_are_parsed_in_a_sandbox(expressions: VerifierPool, tmp_path: Path) -> None:
    """SymPy's parser evaluates Python: what gets through has nothing to reach."""
    outside = tmp_path / "written"
    attack = f"__import__('os').system('touch {outside}')"
    (verdict,) = expressions.verify([sample(attack, answer=attack)])
    assert verdict.reward in (None, 0.0, 1.0)
    assert not outside.exists()
    workers = [psutil.Process(pid) for pid in expressions.worker_pids]
    inside = [process for worker in workers for process in worker.children(recursive=True)]
    assert inside
    assert {process.environ().get("HOME", "/sandbox") for process in inside if process.cmdline()[1:2] == ["-I"]} == {
        "/sandbox"
    }
    assert os.getuid() or all(process.uids().real for process in inside if process.cmdline()[1:2] == ["-I"])
