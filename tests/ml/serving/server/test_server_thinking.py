"""Thinking budgets: closed after exactly so many tokens, one stream for the client, whatever name the client sends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from scripted_engine import NEVER, SECONDS, Script, ScriptedEngine, Served, tokens_of
from test_server_answers import ASK, events_of, post

from craton.ml.data import load_tokenizer
from craton.ml.serving.messages import Abort, Submit

PATH = "/v1/chat/completions"
THOUGHT = "the quick brown fox says hello to the world and the quick brown fox"
CLOSING = "\n</think>\n\n"
HELD_SEED = 5  # with which the engine stops while it thinks


@pytest.fixture(scope="module")
def thinking_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the other tests, with marks that are one token each, as thinking models have them."""
    folder = tmp_path_factory.mktemp("thinking")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def thinker(thinking_folder: Path) -> Iterator[Served]:
    """A front end whose engine thinks THOUGHT and then answers 4."""
    engine = ScriptedEngine(lambda _: Script())
    served = Served(engine, "--model-folder", str(thinking_folder), "--reasoning-parser", "think")
    yield served
    served.stop()


@pytest.fixture
def thoughts(thinker: Served, thinking_folder: Path) -> list[int]:
    """The tokens of THOUGHT. The engine writes them up to `</think>`, and the answer behind it."""
    opening, thought = tokens_of(thinking_folder, "<think>"), tokens_of(thinking_folder, THOUGHT)
    rest = tokens_of(thinking_folder, "4")
    closed = tokens_of(thinking_folder, CLOSING)

    def answer(submit: Submit) -> Script:
        if submit.generated:
            assert submit.generated[-len(closed) :] == tuple(closed)
            return Script(rest)
        hold_at = 9 if submit.sampling.seed == HELD_SEED else NEVER
        return Script([*opening, *thought, *closed, *rest], 3, hold_at=hold_at)

    thinker.engine.forget()
    thinker.engine.answer = answer
    return thought


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thinking_ends_after_exactly_its_budget(
    thinker: Served, thinking_folder: Path, thoughts: list[int], name: str, budget: int
) -> None:
    body = {"messages": ASK, name: budget, "seed": HELD_SEED, "return_token_ids": True}
    answer = post(thinker, PATH, body)
    choice = answer["choices"][0]
    closing = tokens_of(thinking_folder, CLOSING)
    first, second = thinker.engine.wait_for(Submit, 2)
    assert list(second.generated) == [*tokens_of(thinking_folder, "<think>"), *thoughts[:budget], *closing]
    assert (second.prompt, second.sampling) == (first.prompt, first.sampling), "the same request goes on"
    assert thinker.engine.wait_for(Abort)[0].id == first.id
    assert choice["token_ids"] == [*second.generated, *tokens_of(thinking_folder, "4")]
    assert choice["message"]["content"] == "4"
    thought = load_tokenizer(thinking_folder).decode(thoughts[:budget])
    assert (choice["message"]["reasoning_content"] or "") == thought
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(first.prompt)
    assert choice["finish_reason"] == "stop"


def test_a_stream_goes_on_behind_the_budget(thinker: Served, thinking_folder: Path, thoughts: list[int]) -> None:
    body = {"messages": ASK, "thinking_budget": 5, "logprobs": True, "top_logprobs": 1}
    events = events_of(thinker, PATH, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    text = load_tokenizer(thinking_folder).decode(thoughts[:5])
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == text
    assert "".join(delta.get("content") or "" for delta in deltas) == "4"
    scores = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    forced = len(tokens_of(thinking_folder, CLOSING))
    assert [score["logprob"] for score in scores] == [-0.5] * 6 + [0.0] * forced + [-0.5]


def test_thinking_that_ends_by_itself_is_left_alone(thinker: Served, thoughts: list[int]) -> None:
    answer = post(thinker, PATH, {"messages": ASK, "thinking_budget": len(thoughts) + 2})
    assert answer["choices"][0]["message"]["reasoning_content"] == THOUGHT
    assert len(thinker.engine.wait_for(Submit)) == 1
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] in (len(thoughts), len(thoughts) + 1), "the line break before the mark counts"


@pytest.mark.parametrize(("content", "is_inside"), [("<think> hello", True), ("<think>a</think> hello", False)])
def test_a_continued_message_may_end_within_its_thinking(
    thinker: Served, thinking_folder: Path, content: str, is_inside: bool
) -> None:
    thinker.engine.forget()
    thinker.engine.answer = lambda _: Script(tokens_of(thinking_folder, " world" + is_inside * f"{CLOSING}4"))
    said = {"role": "assistant", "content": content}
    body = {"messages": [*ASK, said], "continue_final_message": True, "add_generation_prompt": False}
    message = post(thinker, PATH, body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ((" world", "4") if is_inside else (None, " world"))


def test_two_answers_have_a_budget_each(thinker: Served, thoughts: list[int]) -> None:
    answer = post(thinker, PATH, {"messages": ASK, "thinking_budget": 3, "n": 2, "seed": 11})
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["4", "4"]
    assert [choice["seed"] for choice in answer["choices"]] == [11, 12]
    assert sorted(submit.sampling.seed or 0 for submit in thinker.engine.wait_for(Submit, 3)[1:]) == [11, 12]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_no_room_for_an_answer_ends_it_at_its_length(thinker: Served, thoughts: list[int]) -> None:
    answer = post(thinker, PATH, {"messages": ASK, "thinking_budget": 5, "max_tokens": 7})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6
    assert len(thinker.engine.wait_for(Submit)) == 1


def test_a_prompt_that_opens_the_thinking_may_think_nothing(
    thinker: Served, thinking_folder: Path, thoughts: list[int]
) -> None:
    thinker.engine.answer = lambda _: Script(tokens_of(thinking_folder, "4"))
    for fields in ({"thinking_token_budget": 0}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        answer = post(thinker, PATH, {"messages": ASK, "chat_template_kwargs": {"think": True}, **fields})
        submit = thinker.engine.wait_for(Submit)[-1]
        assert tokens_of(thinking_folder, "</think>")[0] in submit.prompt
        assert answer["choices"][0]["message"]["content"] == "4"
        thinker.engine.forget()


def test_an_effort_is_a_budget(thinker: Served, thoughts: list[int]) -> None:
    answer = post(thinker, PATH, {"messages": ASK, "reasoning_effort": "low"})
    assert answer["choices"][0]["message"]["reasoning_content"] == THOUGHT
    refused = requests.post(f"{thinker.url}{PATH}", json={"messages": ASK, "reasoning_effort": "huge"}, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "many"}, "thinking_token_budget"),
        ({"thinking_token_budget": 3, "thinking_budget": 4}, "thinking_token_budget"),
        ({"thinking_budget": 3, "enable_thinking": False}, "thinking_budget"),
        ({"thinking_budget": 3, "response_format": {"type": "json_object"}}, "thinking_budget"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(thinker: Served, fields: dict[str, Any], name: str) -> None:
    refused = requests.post(f"{thinker.url}{PATH}", json={"messages": ASK, **fields}, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_server_without_a_parser_says_what_a_budget_needs(served: Served) -> None:
    refused = requests.post(f"{served.url}{PATH}", json={"messages": ASK, "thinking_token_budget": 3}, timeout=SECONDS)
    assert refused.status_code == 400
    assert "reasoning_parser: think" in refused.json()["error"]["message"]
    answered = requests.post(f"{served.url}{PATH}", json={"messages": ASK, "reasoning_effort": "low"}, timeout=SECONDS)
    assert (answered.status_code, answered.headers["X-Ignored-Fields"]) == (200, "reasoning_effort")
