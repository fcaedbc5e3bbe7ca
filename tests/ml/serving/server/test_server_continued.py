"""`continue_from`: clients get what follows the tokens that they send, as if the answer had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
from scripted_engine import MAX_LENGTH, SECONDS, VOCABULARY, Script, ScriptedEngine, Served
from test_server_answers import ASK, EMOJI, WEATHER, Encode, events_of, post

from craton.ml.serving.messages import Submit


def answer_with(engine: ScriptedEngine, tokens: list[int], **script: Any) -> None:
    """Every request gets what follows its generated tokens."""
    engine.answer = lambda submit: Script(tokens[len(submit.generated) :], **script)


def error_of(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = requests.post(served.url + path, json=body, timeout=SECONDS)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def pieces_of(events: list[Any], text: Callable[[Any], str]) -> list[tuple[list[int], str]]:
    """Token ids and text of each event of a stream."""
    choices = [event["choices"][0] for event in events]
    return [(choice.get("token_ids", []), text(choice)) for choice in choices]


def expect_the_rest(
    served: Served, path: str, body: dict[str, Any], tokens: list[int], text: Callable[[Any], str]
) -> None:
    """That every event of a stream, continued from its tokens so far, is followed by the rest, streamed or not."""
    answer_with(served.engine, tokens)
    body = {**body, "return_token_ids": True, "max_tokens": 200}
    whole = events_of(served, path, body)
    pieces = pieces_of(whole, text)
    cuts = [place for place, (ids, _) in enumerate(pieces) if ids]
    for cut in cuts[:-1]:
        ids = [token for tokens, _ in pieces[: cut + 1] for token in tokens]
        rest = "".join(text for _, text in pieces[cut + 1 :])
        continued = events_of(served, path, {**body, "continue_from": ids})
        assert "".join(text for _, text in pieces_of(continued, text)) == rest, ids
        assert [token for tokens, _ in pieces_of(continued, text) for token in tokens] == tokens[len(ids) :]
        assert continued[-1]["choices"][0]["finish_reason"] == whole[-1]["choices"][0]["finish_reason"]


def completion_text(choice: Any) -> str:
    return str(choice["text"])


def content(choice: Any) -> str:
    return choice["delta"].get("content") or ""


def test_characters_across_the_boundary_come_whole(served: Served, encode: Encode) -> None:
    tokens = encode(EMOJI)
    expect_the_rest(served, "/v1/completions", {"prompt": [5]}, tokens, completion_text)
    expect_the_rest(served, "/v1/chat/completions", {"messages": ASK}, tokens, content)
    whole = post(served, "/v1/completions", {"prompt": [5], "max_tokens": 200, "return_token_ids": True})
    assert whole["choices"][0]["text"] == EMOJI
    inside = next(cut for cut in range(len(tokens)) if "👩".encode()[:2] in served_bytes(tokens[:cut], encode))
    rest = post(served, "/v1/completions", {"prompt": [5], "max_tokens": 200, "continue_from": tokens[:inside]})
    assert "\N{REPLACEMENT CHARACTER}" not in rest["choices"][0]["text"]
    assert EMOJI.endswith(rest["choices"][0]["text"])
    assert rest["usage"] == {
        "prompt_tokens": 1,
        "continued_tokens": inside,
        "completion_tokens": len(tokens) - inside,
        "total_tokens": 1 + len(tokens) - inside,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def served_bytes(tokens: list[int], encode: Encode) -> bytes:
    """The bytes of the tokens, of which a prefix of EMOJI has as many."""
    for end in range(len(EMOJI) + 1):
        if len(encode(EMOJI[:end])) >= len(tokens):
            return EMOJI[:end].encode()
    return EMOJI.encode()


def test_a_stop_string_across_the_boundary_ends_the_answer(served: Served, encode: Encode) -> None:
    tokens = encode("hello world the quick brown fox")
    body = {"prompt": [5], "max_tokens": 100, "stop": ["the qu", "never"]}
    answer_with(served.engine, tokens)
    end = len(encode("hello world the qu"))
    for cut in range(1, end):
        choice = post(served, "/v1/completions", {**body, "continue_from": tokens[:cut]})["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "the qu"), cut
        assert "hello world ".endswith(choice["text"])
    # held back text that turns out not to begin a stop string comes with the new text
    held = len(encode("hello world the"))
    choice = post(served, "/v1/completions", {**body, "stop": "the x", "continue_from": tokens[:held]})["choices"][0]
    assert choice["text"] == "the quick brown fox"


def test_an_answer_that_is_complete_ends_at_once(served: Served, encode: Encode) -> None:
    tokens = encode("hello fox")
    answer_with(served.engine, tokens, finish="length")
    body = {"prompt": [5], "max_tokens": 100, "stop": "fox", "continue_from": tokens}
    answer = post(served, "/v1/completions", body)
    (submit,) = served.engine.wait_for(Submit)
    assert submit.sampling.max_tokens == len(tokens), "the engine computes nothing more"
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "fox")
    assert answer["usage"]["completion_tokens"] == 0


def test_min_tokens_count_the_generated_ones(served: Served, encode: Encode) -> None:
    tokens = encode("fox and fox")
    answer_with(served.engine, tokens)
    body = {"prompt": [5], "max_tokens": 100, "stop": "fox", "min_tokens": len(encode("fox and")), "continue_from": []}
    assert post(served, "/v1/completions", body)["choices"][0]["text"] == "fox and "
    choice = post(served, "/v1/completions", {**body, "continue_from": encode("fox")})["choices"][0]
    assert choice["text"] == " and "


def test_log_probabilities_are_those_of_the_new_tokens(served: Served, encode: Encode) -> None:
    tokens = encode("hello world the quick")
    answer_with(served.engine, tokens)
    body = {"prompt": [5], "max_tokens": 100, "logprobs": 1, "continue_from": tokens[:2]}
    choice = post(served, "/v1/completions", body)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(tokens) - 2
    assert choice["logprobs"]["text_offset"][0] == 0
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.fixture(scope="module")
def thinking(start: Callable[..., Served]) -> Served:
    return start("--reasoning-parser", "think")


def test_reasoning_goes_on_where_it_was(thinking: Served, encode: Encode) -> None:
    tokens = encode("<think>what is 2 + 2?</think>It is 4.")
    answer_with(thinking.engine, tokens)
    for inside, expected in (
        ("<think>what is", (" 2 + 2?", "It is 4.")),
        ("<think>what is 2 + 2?</think>It", (None, " is 4.")),
    ):
        begun = encode(inside)
        assert tokens[: len(begun)] == begun
        answer = post(thinking, "/v1/chat/completions", {"messages": ASK, "continue_from": begun})
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == expected


def test_a_tool_call_goes_on_where_it_was(served: Served, encode: Encode) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    tokens = encode(call)
    answer_with(served.engine, tokens)
    begun = encode(call[: call.index("Paris")])
    assert tokens[: len(begun)] == begun
    body = {"messages": ASK, "tools": [WEATHER], "continue_from": begun}
    choice = post(served, "/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (part,) = choice["message"]["tool_calls"]
    assert (part["function"]["name"], part["function"]["arguments"]) == ("weather", 'Paris"}')
    deltas = [event["choices"][0]["delta"] for event in events_of(served, "/v1/chat/completions", body)]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == 'Paris"}'
    assert {part["index"] for part in parts} == {0}
    assert not any("name" in part["function"] for part in parts), "the client has the name"
    ended = post(served, "/v1/chat/completions", {**body, "continue_from": tokens})["choices"][0]
    assert (ended["finish_reason"], ended["message"].get("tool_calls")) == ("tool_calls", None)


def test_every_answer_has_the_seed_that_continues_it(served: Served, encode: Encode) -> None:
    answer_with(served.engine, encode("hello"))
    for path, body in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", {"messages": ASK})):
        served.engine.forget()
        choices = post(served, path, {**body, "n": 2})["choices"]
        stream = events_of(served, path, body)
        given = post(served, path, {**body, "seed": 12, "n": 2})["choices"]
        drawn, streamed, _ = [submit.sampling.seed for submit in served.engine.wait_for(Submit, 3)]
        assert drawn is not None
        assert [choice["seed"] for choice in choices] == [drawn, drawn + 1]
        assert drawn + 127 < 1 << 53, "a whole number in JavaScript, too"
        assert stream[0]["choices"][0]["seed"] == streamed != drawn
        assert [choice["seed"] for choice in given] == [12, 13]


def test_generated_tokens_reach_the_engine(served: Served, encode: Encode) -> None:
    answer_with(served.engine, encode("hello world"))
    post(served, "/v1/completions", {"prompt": [5, 6], "max_tokens": 9, "continue_from": [70, 71]})
    (submit,) = served.engine.wait_for(Submit)
    assert (submit.prompt, submit.generated, submit.sampling.max_tokens) == ((5, 6), (70, 71), 9)


@pytest.mark.parametrize(
    ("more", "message", "code"),
    [
        ({"n": 2}, "continue_from continues one answer, and n is 2", None),
        ({"prompt": [[5], [6]]}, "got 2 prompts, echo false", None),
        ({"echo": True}, "got 1 prompts, echo true", None),
        ({"continue_from": [VOCABULARY]}, f"continue_from has token {VOCABULARY}", None),
        ({"max_tokens": 1}, "continue_from has 2 tokens, and max_tokens, which counts them, is 1", None),
        (
            {"prompt": [5] * (MAX_LENGTH - 1), "max_tokens": None},
            f"plus the 2 of continue_from exceed the model's context of {MAX_LENGTH}",
            "context_length_exceeded",
        ),
    ],
)
def test_what_cannot_be_continued(served: Served, more: dict[str, Any], message: str, code: str | None) -> None:
    error = error_of(served, {"prompt": [5], "max_tokens": 10, "continue_from": [70, 71], **more})
    assert message in error["message"]
    assert (error["param"], error["code"]) == ("continue_from", code)


def test_what_the_engine_refuses_is_the_clients_error(served: Served) -> None:
    served.engine.answer = lambda _: Script(finish="error", error="token 0 among the generated tokens ends an answer")
    for path, body in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", {"messages": ASK})):
        error = error_of(served, {**body, "continue_from": [0], "stream": True}, path)
        assert "ends an answer" in error["message"]
