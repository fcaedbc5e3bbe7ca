"""Requests that would cost too much are refused for next to nothing, and unknown fields are not passed over."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from scripted_engine import MAX_LENGTH, SECONDS, Served
from waiting import wait_until

from craton.ml.serving.messages import Submit

Start = Callable[..., Served]
TOO_LONG = "context_length_exceeded"
MANY = dict.fromkeys(map(str, range(5000)), 1)
ASK: Any = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def post(served: Served, path: str, body: object) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(served.url + path, data=data, headers={"Content-Type": "application/json"}, timeout=SECONDS)
    return answer.status_code, answer.json()["error"]


REFUSED: dict[str, tuple[str, object, int, str]] = {
    "a prompt of 4 MB": (COMPLETIONS, {"prompt": "hello world " * 350_000}, 413, "body_too_large"),
    "a prompt of 1 MB": (COMPLETIONS, {"prompt": "hello " * 200_000}, 400, TOO_LONG),
    "a chat of 1 MB": (CHATS, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, 400, TOO_LONG),
    "a text of 1 MB to tokenize": ("/tokenize", {"prompt": "a" * 1_000_000}, 400, TOO_LONG),
    "too many tokens of text": (COMPLETIONS, {"prompt": "x y " * 600}, 400, TOO_LONG),
    "too many tokens to detokenize": ("/detokenize", {"tokens": [5] * (MAX_LENGTH + 1)}, 400, TOO_LONG),
    "more messages than tokens": (CHATS, {"messages": ASK * (MAX_LENGTH + 1)}, 400, TOO_LONG),
    "a million tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * 900_000 + b"1]}", 413, ""),
    "90,000 wrong tokens": (COMPLETIONS, {"prompt": [-1] * 90_000}, 400, "invalid_body"),
    "JSON that is nested too deep": (COMPLETIONS, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    "a regex of 1 MB": (COMPLETIONS, {"prompt": [5], "guided_regex": "a" * 1_000_000}, 400, "grammar_too_large"),
    "5,000 biases": (COMPLETIONS, {"prompt": [5], "logit_bias": MANY}, 400, "invalid_body"),
    "5,000 stop tokens": (COMPLETIONS, {"prompt": [5], "stop_token_ids": [5] * 5000}, 400, "invalid_body"),
    "5,000 choices": (COMPLETIONS, {"prompt": [5], "n": 5000}, 400, "invalid_body"),
    "5,000 unknown fields": (COMPLETIONS, {"prompt": [5], **{f"f{n}": 1 for n in range(5000)}}, 400, "unknown_field"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_too_much_is_refused_before_the_engine_sees_it(served: Served, name: str) -> None:
    path, body, status, code = REFUSED[name]
    found, error = post(served, path, body)
    assert found == status, error
    assert not code or error["code"] == code
    assert len(error["message"]) < 500
    assert not [message for message in served.engine.received if isinstance(message, Submit)]


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"temprature": 0}, "did you mean 'temperature'"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(served: Served, fields: dict[str, Any], meant: str) -> None:
    status, error = post(served, COMPLETIONS, {"prompt": [5], **fields})
    assert (status, meant in error["message"]) == (400, True)


def test_fields_that_ask_for_nothing_are_taken_and_unknown_ones_are_named(served: Served) -> None:
    body = {
        "prompt": [5],
        "n": 2,
        "best_of": 2,
        "suffix": None,
        "user": "me",
        "length_penalty": 1.0,
        "top_a": 0.5,
        "zz": 1,
    }
    answer = requests.post(served.url + COMPLETIONS, json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Fields"] == "top_a, zz"


def test_half_sent_requests_are_closed_and_do_not_hold_up_others(start: Start) -> None:
    served = start("--client-seconds", "0.3")
    wait_until(lambda: requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 200)
    address = urlsplit(served.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    texts = (b"", head, head + b'Content-Type: application/json\r\nContent-Length: 40\r\n\r\n{"prompt": ')
    halves = []
    for text in texts * 20:
        half = socket.create_connection((address.hostname or "", address.port or 0), timeout=SECONDS)
        half.sendall(text)
        halves.append(half)
    assert requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 200
    for half in halves:
        while half.recv(4096):
            pass
        half.close()


def test_a_head_without_an_end_is_refused(start: Start) -> None:
    served = start("--client-seconds", "600")
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=SECONDS) as connection:
        said = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET / HTTP/1.1\r\n" + (b"X-Header: " + b"x" * 1000 + b"\r\n") * 2000)
        with contextlib.suppress(ConnectionError):
            said = connection.recv(100)  # times out where the server still waits for more
        assert said.startswith(b"HTTP/1.1 400") or not said
