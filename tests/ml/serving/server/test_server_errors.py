"""What is wrong with a request is said in OpenAI's form, with the right status, and before the engine is bothered."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
import requests
from scripted_engine import ADMIN, MAX_LENGTH, SECONDS, VOCABULARY, Script, Served

from craton.ml.serving.messages import Abort, Submit
from craton.orchestration import ServerAddress, ServerWatch

Encode = Callable[[str], list[int]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASK: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "f"}}
CALL: Any = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID: Any = {"role": "assistant", "content": "It is"}
OPEN: Any = {"continue_final_message": True, "add_generation_prompt": False}


def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error, which must have OpenAI's form."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **ADMIN}
    answer = requests.post(served.url + path, data=data, headers=headers, timeout=SECONDS)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_an_unknown_model(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'nobody' does not exist; available: 'scripted', 'painter'"):
        served.client().chat.completions.create(model="nobody", messages=ASK)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("extra", [{}, {"stream": True}])
def test_a_prompt_that_is_too_long(served: Served, path: str, extra: dict[str, Any]) -> None:
    text = "hello " * MAX_LENGTH
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = refused(served, path, {**body, **extra})
    tokens = requests.post(served.url + "/tokenize", json=body, timeout=SECONDS).json()["count"]
    assert f"{tokens} tokens" in error["message"]
    assert f"{MAX_LENGTH} tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_more_tokens_than_the_context_has(served: Served) -> None:
    error = refused(served, COMPLETION, {"prompt": [1] * 24, "max_tokens": MAX_LENGTH})
    assert f"24 tokens plus max_tokens {MAX_LENGTH}" in error["message"]
    assert f"lower max_tokens to {MAX_LENGTH - 24} or less" in error["message"]
    requests.post(served.url + COMPLETION, json={"prompt": [1] * (MAX_LENGTH - 4)}, timeout=SECONDS).raise_for_status()
    assert served.engine.wait_for(Submit)[0].sampling.max_tokens == 4, "clipped, when nothing was asked for"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, b"{not json", "not JSON"),
        (CHAT, b"\xff\xfe", ""),
        (CHAT, b"[" * 100_000, ""),
        (CHAT, {}, "messages: Field required"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": ASK, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": ASK, "temperature": -1}, "temperature"),
        (CHAT, b'{"messages": [{"role": "user"}], "temperature": NaN}', "temperature"),
        (CHAT, {"messages": ASK, "top_logprobs": 2}, "top_logprobs requires logprobs"),
        (CHAT, {"messages": ASK, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": ASK, "n": 0}, "n: "),
        (CHAT, {"messages": ASK, "stop": [""]}, "stop"),
        (CHAT, {"messages": ASK, "stream": True, "prompt_logprobs": 1}, "stream"),
        (CHAT, {"messages": ASK, "min_tokens": 9, "max_tokens": 8}, "min_tokens 9"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (CHAT, {"messages": ASK, "tool_choice": "required"}, "needs tools"),
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "'g'"),
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (CHAT, {"messages": ASK, "guided_regex": "a", "response_format": {"type": "json_object"}}, "only one"),
        (CHAT, {"messages": ASK, "response_format": {"type": "json_schema"}}, "json_schema.schema"),
        (CHAT, {"messages": ASK, "guided_json": "{"}, "guided_json is not JSON"),
        (CHAT, {"messages": ASK, "guided_choice": []}, "guided_choice"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "the template says no"),
        (CHAT, {"messages": [*ASK, SAID], "continue_final_message": True}, "add_generation_prompt (default true)"),
        (CHAT, {"messages": ASK, **OPEN}, "continue_final_message needs a last message of the assistant"),
        (CHAT, {"messages": [*ASK, {"role": "assistant"}], **OPEN}, "no content"),
        (CHAT, {"messages": [*ASK, SAID | {"tool_calls": [CALL]}], **OPEN}, "tool calls, which follow it"),
        ("/tokenize", {"messages": ASK, **OPEN}, "continue_final_message needs a last message of the assistant"),
        (COMPLETION, {"prompt": ""}, "no tokens"),
        (COMPLETION, {"prompt": []}, "no tokens"),
        (COMPLETION, {"prompt": [VOCABULARY]}, f"token {VOCABULARY}"),
        (COMPLETION, {"prompt": [-1]}, "prompt"),
        (COMPLETION, {"prompt": [[1]] * 65, "n": 2}, "130 answers"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"cat": 1}}, "'cat'"),
        (COMPLETION, {"prompt": "x", "logit_bias": {str(VOCABULARY): 1}}, f"'{VOCABULARY}'"),
        (COMPLETION, {"prompt": "x", "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        (COMPLETION, {"prompt": "x", "seed": 1 << 64}, "seed"),
        ("/tokenize", {}, "either prompt or messages"),
        ("/detokenize", {"tokens": [VOCABULARY]}, f"token {VOCABULARY}"),
        ("/update_weights", {"folder": "a", "address": "b"}, "either folder or address"),
    ],
)  # fmt: skip
def test_a_bad_request(served: Served, path: str, body: Any, said: str) -> None:
    error = refused(served, path, body)
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    if isinstance(body, dict) and "continue_final_message" in body:
        assert error["param"] == "continue_final_message"
    assert not [message for message in served.engine.received if isinstance(message, Submit)]


def test_paths_that_do_not_exist(served: Served) -> None:
    refused(served, "/v1/nothing", {}, 404)
    refused(served, "/health", {}, 405)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_engine_refuses_is_an_error_before_the_stream_begins(served: Served, is_stream: bool) -> None:
    served.engine.answer = lambda _: Script(finish="error", error="the grammar cannot be read: line 1")
    body = {"messages": ASK, "guided_grammar": "start", "stream": is_stream}
    assert refused(served, CHAT, body)["message"] == "the grammar cannot be read: line 1"


def test_a_request_that_breaks_on_the_way(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode("hello world"), finish="error", error="its logits are not numbers")
    assert refused(served, CHAT, {"messages": ASK}, 500)["message"] == "its logits are not numbers"
    served.engine.answer = lambda _: Script(encode("hello world"), hold_at=2, finish="error", error="its logits are …")
    stream = served.client().chat.completions.create(model="scripted", messages=ASK, stream=True)
    served.engine.release()
    texts: list[str | None] = []
    with pytest.raises(openai.APIError, match="its logits are …"):
        texts.extend(chunk.choices[0].delta.content for chunk in stream)
    assert "".join(text or "" for text in texts).startswith("hello")


def test_too_many_wait(start: Callable[..., Served], encode: Encode) -> None:
    served = start("--max-waiting", "1")
    served.engine.answer = lambda _: Script(encode("hello"), hold_at=0)
    body = {"messages": ASK, "stream": True}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(requests.post, served.url + CHAT, json=body, timeout=SECONDS)
        served.engine.wait_for(Submit)
        answer = requests.post(served.url + CHAT, json=body, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        state = ServerWatch(ServerAddress("127.0.0.1", int(served.url.rpartition(":")[2]))).look()
        assert state is not None
        assert state.refused == 1
        assert requests.get(served.url + "/health", timeout=SECONDS).status_code == 200
        served.engine.release()
        assert waiting.result(SECONDS).status_code == 200
    assert requests.post(served.url + CHAT, json={"messages": ASK}, timeout=SECONDS).status_code == 200


def test_a_body_that_is_too_large(start: Callable[..., Served]) -> None:
    served = start("--max-body", "1000")
    body = {"prompt": "x" * 2000}
    assert "1,000 bytes" in refused(served, COMPLETION, body, 413)["message"]
    chunks = (json.dumps(body).encode()[at : at + 100] for at in range(0, 3000, 100))
    headers = {"content-type": "application/json", **ADMIN}
    answer = requests.post(served.url + COMPLETION, data=chunks, headers=headers, timeout=SECONDS)
    assert (answer.status_code, "1,000 bytes" in answer.json()["error"]["message"]) == (413, True)
    assert requests.post(served.url + COMPLETION, json={"prompt": "x"}, timeout=SECONDS).status_code == 200


def test_a_request_that_takes_too_long_is_given_up(start: Callable[..., Served], encode: Encode) -> None:
    served = start("--request-timeout", "0.3")
    for hold_at in (0, 1):
        served.engine.forget()
        served.engine.answer = partial(lambda hold_at, _: Script(encode("hello world"), hold_at=hold_at), hold_at)
        assert "300 ms" in refused(served, CHAT, {"messages": ASK}, 504)["message"]
        (submit,) = served.engine.wait_for(Submit)
        assert served.engine.wait_for(Abort)[0].id == submit.id


def test_tools_need_a_style_that_is_known(start: Callable[..., Served]) -> None:
    served = start("--tool-parser", "none")
    assert "--tool-parser" in refused(served, CHAT, {"messages": ASK, "tools": [TOOL]})["message"]
