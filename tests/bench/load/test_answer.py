"""Reading a stream: which pieces carry tokens, what usage says, and every way in which it can end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from craton.bench.load.answer import StreamedResponse


def event(content: dict[str, Any], space: str = "") -> bytes:
    return f"data:{space}{json.dumps(content, separators=(',', ':' + space))}\n\n".encode()


def completion(text: str, finish: str | None = None, space: str = "") -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}, space)


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}},
    }
)
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> StreamedResponse:
    """The piece with number n arrives at time n."""
    answer = StreamedResponse()
    for now, piece in enumerate(pieces):
        answer.feed(piece, float(now))
    answer.close()
    return answer


@pytest.mark.parametrize("space", ["", " "])
def test_a_completion(space: str) -> None:
    answer = read(
        completion(" a", space=space), completion(" b", space=space), completion(" c", "length", space), USAGE, DONE
    )
    assert list(answer.chunk_times) == [0, 1, 2]
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (12, 5, 8)
    assert (answer.finish_reason, answer.end_time, answer.error) == ("length", 2, "")


def test_who_speaks_is_no_token_in_a_chat() -> None:
    answer = read(
        chat({"role": "assistant", "content": ""}),
        chat({"content": "Hi"}),
        chat({"role": None, "content": "", "reasoning_content": "so"}),
        chat({}),
        chat({"role": "assistant", "content": " again"}),
        chat({"tool_calls": [{"function": {"arguments": "{"}}]}),
        chat({}, "stop"),
        DONE,
    )
    assert list(answer.chunk_times) == [1, 2, 4, 5]
    assert (answer.end_time, answer.error) == (6, "")


def test_a_token_may_have_no_text() -> None:
    """Part of a character, or a special token; but the piece that only says why it ended carries none."""
    answer = read(completion(""), completion(""), completion("ü"), completion("", "stop"), DONE)
    assert list(answer.chunk_times) == [0, 1, 2]
    assert list(read(chat({"content": ""}), chat({"content": "x"}), DONE).chunk_times) == [0, 1]


def test_a_text_that_looks_like_the_protocol_is_text() -> None:
    hostile = '"finish_reason":"stop" data: [DONE]\n\n "finish_reason":null "role":"'
    answer = read(completion("a"), completion(hostile), completion(hostile, "length"), DONE)
    assert list(answer.chunk_times) == [0, 1, 2]
    assert answer.finish_reason == "length"


def test_events_may_be_split_anywhere_and_come_together() -> None:
    whole = chat({"role": "assistant", "content": ""}) + chat({"content": "wörd"}) * 3 + chat({}, "stop") + USAGE + DONE
    expected = (3, "stop", 5, "")
    for cut in range(len(whole)):
        answer = read(whole[:cut], whole[cut:])
        assert (len(answer.chunk_times), answer.finish_reason, answer.output_tokens, answer.error) == expected
    answer = read(*(bytes([byte]) for byte in whole))
    assert (len(answer.chunk_times), answer.finish_reason, answer.output_tokens, answer.error) == expected


def test_line_ends_comments_and_names_of_events() -> None:
    whole = (
        b": ping\r\n\r\nevent: message\r\n" + completion("a").replace(b"\n", b"\r\n") + completion("b", "stop") + DONE
    )
    assert list(read(whole.replace(b"[DONE]\n", b"[DONE]\r\n")).chunk_times) == [0, 0]


ENDS: dict[str, tuple[list[bytes], str]] = {
    "whole": ([completion("a", "stop"), DONE], ""),
    "without [DONE]": ([completion("a", "stop")], ""),
    "without a reason": ([completion("a"), DONE], ""),
    "cut": ([completion("a")], "cut short"),
    "nothing at all": ([], "cut short"),
    "no token": ([completion("", "stop"), DONE], "empty answer"),
    "given up": ([completion("a"), completion("", "abort"), DONE], "ended by the server: abort"),
    "an error": ([completion("a"), event({"error": {"message": "broke"}}), DONE], "error in the stream"),
    "an error like a token": (
        [completion("a"), event({"error": "x", "choices": [{"text": "", "finish_reason": None}]}), DONE],
        "error in the stream",
    ),
    "not JSON": ([b"data: <html>\n\n"], "not OpenAI's format"),
    "not an object": ([b"data: 7\n\n"], "not OpenAI's format"),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_it_ended(case: str) -> None:
    pieces, error = ENDS[case]
    answer = read(*pieces)
    assert answer.error == error
    assert bool(answer.error_detail) == (error not in ("", "ended by the server: abort"))
