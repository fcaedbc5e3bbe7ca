"""Structured output: whatever is chosen among the allowed tokens fits the schema, the expression or the grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from craton.ml.data import load_tokenizer
from craton.ml.data.tokenizer import train_bpe
from craton.ml.serving.device.sampler import unpack_bits
from craton.ml.serving.grammar import GrammarError, Grammars, GrammarState
from craton.ml.serving.grammar.grammars import mask_words
from craton.ml.serving.messages import Grammar

PADDED = 451  # not a multiple of anything, and far more than the tokenizer has
DEADLINE = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = '{"name": "fox", "age": 42, "kind": "cat"} hello world true false null Grüße 数 😀\n'
    train_bpe([text] * 20, 400, folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    made = Grammars(folder, PADDED, stop_tokens=(0, 2))
    yield made
    made.close()


def start(grammars: Grammars, kind: str, text: str = "") -> GrammarState:
    return grammars.start(Grammar(kind, text)).result(DEADLINE)  # type: ignore[arg-type]


def allowed(state: GrammarState) -> list[int]:
    mask = np.full(mask_words(PADDED), -1, dtype=np.int32)
    state.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in bits.nonzero()[0]]


def write(state: GrammarState, tokenizer: object, seed: int, limit: int = 400) -> str:
    """A text of random allowed tokens, until nothing but a stop token may follow or one was drawn."""
    chance, tokens = random.Random(seed), []
    while not state.is_finished and len(tokens) < limit:
        choices = allowed(state)
        # one that may end does so now and then, or random texts would be long ones
        token = 2 if 2 in choices and chance.random() < 0.3 else chance.choice(choices)
        state.accept(token)
        if token not in (0, 2):
            tokens.append(token)
    assert state.is_finished, "it wrote and wrote"
    return str(tokenizer.decode(tokens, skip_special_tokens=False))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(5))
def test_random_answers_fit_the_schema(grammars: Grammars, folder: Path, seed: int) -> None:
    state = start(grammars, "json_schema", json.dumps(SCHEMA))
    answer = json.loads(write(state, load_tokenizer(folder), seed))
    assert set(answer) == {"name", "age", "kind"}
    assert answer["kind"] in ("cat", "dog")
    assert isinstance(answer["age"], int)
    assert 0 <= answer["age"] <= 120
    assert len(answer["name"]) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_random_answers_fit_regular_expressions_and_grammars(grammars: Grammars, folder: Path, seed: int) -> None:
    tokenizer = load_tokenizer(folder)
    expression = r"[a-c]{2,4}-(ü|数|😀)+[0-9]{3}"
    assert re.fullmatch(expression, write(start(grammars, "regex", expression), tokenizer, seed))
    lark = 'start: word ("," word)*\nword: /[xyz]+/'
    assert re.fullmatch(r"[xyz]+(,[xyz]+)*", write(start(grammars, "lark", lark), tokenizer, seed))


def test_any_object_is_a_json_object(grammars: Grammars, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for text in ('{"a": [1, {"b": null}]}', '{\n  "a": "hello world"\n}', "{}"):
        state = start(grammars, "json_object")
        for token in tokenizer.encode(text).ids:
            state.accept(token)
        assert state.is_finished
    state = start(grammars, "json_object")
    with pytest.raises(GrammarError, match="not allowed"):
        state.accept(tokenizer.encode("[").ids[0])


def test_blanks_come_to_an_end(grammars: Grammars, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    blank = tokenizer.encode(" ").ids[0]
    state = start(grammars, "json_object")
    state.accept(tokenizer.encode("{").ids[0])
    accepted = 0
    while blank in allowed(state):
        state.accept(blank)
        accepted += 1
        assert accepted < 100
    assert accepted > 8


def test_tokens_that_the_tokenizer_lacks_are_never_allowed(grammars: Grammars, folder: Path) -> None:
    known = load_tokenizer(folder).get_vocab_size(with_added_tokens=True)
    assert known < PADDED - 32
    state = start(grammars, "regex", r"(.|\n)*")
    choices = allowed(state)
    assert len(choices) > 200
    assert max(choices) < known
    for token in (known, PADDED - 1, PADDED, 10 * PADDED, -1):
        with pytest.raises(GrammarError, match=f"token {token} is not allowed"):
            state.accept(token)
    assert allowed(state) == choices, "a refused token changes nothing"


def test_stop_tokens_are_allowed_when_the_answer_is_complete(grammars: Grammars, folder: Path) -> None:
    digit = load_tokenizer(folder).encode("7").ids[0]
    state = start(grammars, "regex", "[0-9]{2}")
    for _ in range(2):
        assert not {0, 2} & set(allowed(state))
        assert not state.is_finished
        with pytest.raises(GrammarError, match="token 2 "):
            state.accept(2)
        state.accept(digit)
    assert state.is_finished
    assert allowed(state) == [0, 2]
    state.accept(2)
    assert state.is_finished

    state = start(grammars, "regex", "[0-9]+")
    state.accept(digit)
    assert not state.is_finished
    assert {0, 2, digit} <= set(allowed(state))
    state.accept(0)
    assert state.is_finished


@pytest.mark.parametrize("expression", ["[0-9]{3}", "[0-9]+"])
def test_accepted_tokens_can_be_taken_back(grammars: Grammars, folder: Path, expression: str) -> None:
    digits = [load_tokenizer(folder).encode(digit).ids[0] for digit in "789"]
    state = start(grammars, "regex", expression)
    seen = []
    for token in (*digits, 2):
        seen.append(allowed(state))
        state.accept(token)
    state.rollback(1)
    assert allowed(state) == seen[3]
    state.accept(2)
    state.rollback(3)
    assert allowed(state) == seen[1]
    state.accept(digits[0])
    assert allowed(state) == seen[2]
    state.rollback(2)
    assert allowed(state) == seen[0]


def test_forks_go_their_own_ways(grammars: Grammars, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    first, second = (tokenizer.encode(letter).ids[0] for letter in "ab")
    state = start(grammars, "regex", "a(a|b)(b|c)")
    state.accept(first)
    fork = state.fork()
    before = allowed(fork)
    state.accept(second)
    state.accept(second)
    assert state.is_finished
    assert allowed(fork) == before
    fork.accept(first)
    assert not fork.is_finished

    state.accept(2)
    ended = state.fork()
    ended.rollback(1)  # the stop token, and no more
    assert ended.is_finished
    ended.rollback(1)
    assert not ended.is_finished
    assert state.is_finished


def test_masks_of_many_are_those_of_each(grammars: Grammars, folder: Path) -> None:
    digit = load_tokenizer(folder).encode("7").ids[0]
    states = [start(grammars, "regex", expression) for expression in ("[0-9]{2}", "x|7y", "[^7]*", "7")]
    states[0].accept(digit)
    states[3].accept(digit)
    masks = np.full((len(states) + 2, mask_words(PADDED)), -1, dtype=np.int32)
    assert grammars.fill(dict(enumerate(states, 1)), masks) == {}
    for state, mask in zip(states, masks[1:-1], strict=True):
        alone = np.zeros_like(mask)
        state.fill(alone)
        assert (mask == alone).all()
    assert (masks[[0, -1]] == -1).all(), "rows of those without a grammar are left alone"


def test_masks_are_the_bits_that_the_sampler_reads(grammars: Grammars) -> None:
    state = start(grammars, "regex", "[0-9]{2}")
    masks = np.full((3, mask_words(PADDED)), -1, dtype=np.int32)
    state.fill(masks[1])
    found = unpack_bits(torch.from_numpy(masks), PADDED)
    assert found[[0, 2]].all()
    assert found[1].nonzero().flatten().tolist() == allowed(state)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[0-9", "unclosed character class"),
        ("lark", "start: thing", "unknown name"),
        ("lark", "", "Empty grammar"),
        ("json_schema", "{bad", "not JSON"),
        ("json_schema", '{"type": "number of cats"}', "number of cats"),
        ("json_schema", '{"$ref": "#/definitions/none"}', "definitions/none"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented"),
        ("json_schema", "[]", "must be a JSON object"),
    ],
)
def test_what_cannot_be_compiled_is_told_in_the_compilers_words(
    grammars: Grammars, kind: str, text: str, words: str
) -> None:
    with pytest.raises(GrammarError, match=words):
        start(grammars, kind, text)
    assert allowed(start(grammars, "regex", "[0-9]")), "and the next one is not harmed"


def test_a_tokenizer_that_does_not_fit_is_told(folder: Path) -> None:
    for grammars, words in (
        (Grammars(folder, 100, (0,)), "vocab size too small"),
        (Grammars(folder, PADDED, ()), "needs a stop token"),
        (Grammars(folder, PADDED, (PADDED - 1,)), "EOS"),
    ):
        with pytest.raises(GrammarError, match=words):
            start(grammars, "json_object")
        grammars.close()
