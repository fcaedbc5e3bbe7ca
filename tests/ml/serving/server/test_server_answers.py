"""The real openai client against a real front end: what clients get for what the engine says."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from scripted_engine import MAX_LENGTH, SECONDS, Script, Served

from craton.ml.serving.messages import Abort, Alternatives, Grammar, Submit
from craton.ml.serving.text import TokenScore, completion_logprobs

Encode = Callable[[str], list[int]]

ASK: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
EMOJI = "hello 👩‍👩‍👧 the world"


def post(served: Served, path: str, body: Any) -> Any:
    answer = requests.post(served.url + path, json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(served: Served, path: str, body: Any) -> list[Any]:
    """The events of a stream, as they stand on the wire."""
    answer = requests.post(served.url + path, json={**body, "stream": True}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.content.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("in_piece", [1, 3, 100])
def test_a_chat_streams_whole_characters(served: Served, encode: Encode, in_piece: int) -> None:
    served.engine.answer = lambda _: Script(encode(EMOJI), in_piece, stop_token=0, cached_tokens=4)
    stream = served.client().chat.completions.create(
        model="scripted", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *parts, ending, usage = chunks
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == EMOJI
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
    assert (ending.choices[0].finish_reason, ending.choices[0].delta.content) == ("stop", None)
    assert [part.choices[0].finish_reason for part in parts] == [None] * len(parts)
    assert len({chunk.id for chunk in chunks}) == 1
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(encode(EMOJI)) + 1, "the token that ended it was generated too"
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 4


def test_a_chat_that_is_not_streamed_says_the_same(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(EMOJI), cached_tokens=2)
    answer = served.client().chat.completions.create(model="scripted", messages=ASK)
    (submit,) = served.engine.wait_for(Submit)
    assert answer.choices[0].message.content == EMOJI
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submit.prompt)
    assert submit.prompt == tuple(encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))
    assert submit.sampling.max_tokens == MAX_LENGTH - len(submit.prompt), "as much as fits, when nothing is said"


def test_an_answer_continues_the_last_message(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(" the world"))
    said: Any = {"role": "assistant", "content": "hello"}
    answer = served.client().chat.completions.create(
        model="scripted",
        messages=[*ASK, said],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    (submit,) = served.engine.wait_for(Submit)
    assert submit.prompt == tuple(encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello"))
    assert answer.choices[0].message.content == " the world"


def test_an_answer_that_reached_its_length_says_so(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(EMOJI))
    answer = served.client().chat.completions.create(model="scripted", messages=ASK, max_completion_tokens=2)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "hello")
    served.engine.answer = lambda _: Script(encode("hel"), finish="abort")
    body = post(served, "/v1/chat/completions", {"messages": ASK})
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("length", "abort")


@pytest.mark.parametrize("in_piece", [1, 4])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_request(
    served: Served, encode: Encode, in_piece: int, is_stream: bool
) -> None:
    served.engine.answer = lambda _: Script(encode("hello world the quick brown fox " * 4), in_piece, hold_at=24)
    arguments: Any = {"model": "scripted", "prompt": "x", "stop": ["the qu", "never"], "max_tokens": 100}
    if is_stream:
        choices = [chunk.choices[0] for chunk in served.client().completions.create(**arguments, stream=True)]
        text, finish = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        whole = served.client().completions.create(**arguments)
        text, finish = whole.choices[0].text, whole.choices[0].finish_reason
    (submit,) = served.engine.wait_for(Submit)
    assert (text, finish) == ("hello world ", "stop")
    assert served.engine.wait_for(Abort) == [Abort(submit.id, 0)]


def test_one_of_two_answers_stops(served: Served, encode: Encode) -> None:
    texts = iter(["hello fox and on and on", "hello world"])
    served.engine.answer = lambda _: Script(encode(next(texts)), hold_at=8)
    with ThreadPoolExecutor() as threads:
        body = {"prompt": [5], "n": 2, "stop": "fox", "max_tokens": 100}
        answer = threads.submit(post, served, "/v1/completions", body)
        (abort,) = served.engine.wait_for(Abort)
        assert abort.index == 0, "the other one goes on"
        served.engine.release()
        choices = answer.result(SECONDS)["choices"]
    assert [choice["text"] for choice in choices] == ["hello ", "hello world"]
    assert [choice["stop_reason"] for choice in choices] == ["fox", None]
    assert len(served.engine.wait_for(Abort)) == 1


def test_sampling_reaches_the_engine(served: Served) -> None:
    post(
        served,
        "/v1/completions",
        {
            "prompt": [5, 6],
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.5,
            "seed": -3,
            "logit_bias": {"17": -100, "4": 2.5},
            "min_tokens": 2,
            "stop_token_ids": [8, 8, 9],
            "ignore_eos": True,
            "logprobs": 3,
            "prompt_logprobs": 2,
            "priority": -4,
            "n": 2,
        },
    )
    (submit,) = served.engine.wait_for(Submit)
    sampling = submit.sampling
    assert (submit.prompt, submit.copies, submit.priority, submit.adapter) == ((5, 6), 2, -4, None)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.25, 7)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.125, 1, -1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.min_tokens) == (1.5, -3, 2)
    assert (sampling.logit_bias, sampling.stop_tokens) == ({17: -100, 4: 2.5}, (8, 9))
    assert (sampling.ignore_eos, sampling.logprobs, sampling.prompt_logprobs) == (True, 3, 2)


def test_nulls_are_defaults_and_unknown_fields_are_named(served: Served) -> None:
    body = {"prompt": [5], "temperature": None, "n": None, "stop": None, "top_k": -1, "heat": 0, "user": "me"}
    answer = requests.post(served.url + "/v1/completions", json={**body, "\x05\r\nä": 1}, timeout=SECONDS)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "????, heat"
    (submit,) = served.engine.wait_for(Submit)
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.max_tokens) == (1.0, 0, 16)


def test_several_prompts_with_several_answers_each(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda submit: Script(
        encode(" world" if len(submit.prompt) == 1 else " fox"), cached_tokens=1
    )
    answer = served.client().completions.create(model="scripted", prompt=[[5], [5, 6]], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, " world"), (1, " world"), (2, " fox"), (3, " fox"),
    ]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    stream = served.client().completions.create(model="scripted", prompt=["hello", "the"], n=2, stream=True)
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert set(texts) == {0, 1, 2, 3}


def test_log_probs_of_a_chat(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode("hello 👧"))
    client = served.client()
    answer = client.chat.completions.create(model="scripted", messages=ASK, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "hello 👧"
    assert {entry.logprob for entry in content} == {-0.5}
    likeliest = [top.logprob for top in content[0].top_logprobs]
    assert likeliest == [-0.25, -0.5, -0.5], "the three likeliest, sorted, the chosen one among them"
    stream = client.chat.completions.create(model="scripted", messages=ASK, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        entry
        for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == content


def test_log_probs_of_a_completion_with_its_prompt(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(" world"))
    arguments: Any = {"model": "scripted", "prompt": "hello 👧", "echo": True, "logprobs": 2}
    whole = served.client().completions.create(**arguments)
    choice = whole.choices[0]
    assert choice.text == "hello 👧 world"
    assert choice.logprobs is not None
    found = choice.logprobs
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(encode("hello 👧") + encode(" world")) == len(found.token_logprobs)
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None), "nothing comes before the first"
    assert set(found.token_logprobs[1:]) == {-0.5}
    assert "bytes:\\xf0" in found.tokens[3], "a part of a character has a name of its own"
    offsets = found.text_offset
    assert offsets is not None
    assert choice.text[offsets[-2] :] == " world"
    assert offsets == sorted(offsets)
    texts, logprobs = "", []
    for chunk in served.client().completions.create(**arguments, stream=True):
        texts += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            logprobs += chunk.choices[0].logprobs.tokens or []
    assert (texts, logprobs) == (choice.text, found.tokens)


def test_log_probs_of_a_completion_end_with_its_stop_token(served: Served, encode: Encode) -> None:
    """Clients read one for each generated token: lm-eval cuts the last one off to get those of the prompt."""
    served.engine.answer = lambda _: Script(encode(" world"), stop_token=0)
    body = {"prompt": "hello", "echo": True, "logprobs": 1}
    (choice,) = post(served, "/v1/completions", body)["choices"]
    assert choice["text"] == "hello world"
    prompt, answer = len(encode("hello")), len(encode(" world"))
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {prompt + answer + 1}
    assert (found["tokens"][-1], found["text_offset"][-1]) == ("<|endoftext|>", len("hello world"))
    streamed = [event["choices"][0]["logprobs"] for event in events_of(served, "/v1/completions", body)]
    assert [token for logprobs in streamed if logprobs for token in logprobs["tokens"]] == found["tokens"]
    (choice,) = post(served, "/v1/completions", {**body, "return_token_ids": True})["choices"]
    assert len(choice["logprobs"]["tokens"]) == prompt + len(choice["token_ids"]), "the stop token stands apart"


def test_a_sampled_token_has_one_log_prob_wherever_it_is_listed(served: Served) -> None:
    """lm-eval takes a token for the likeliest one if its value is the maximum of the listed ones."""
    sampled, others = (70, -1.25), ((71, -2.0), (70, -1.2500001))
    alternatives = Alternatives(*zip(sampled, *others, strict=True))
    found = completion_logprobs([TokenScore(70, -1.25, alternatives, 0)], 2, None, 0)
    assert max(found["top_logprobs"][0].values()) == found["token_logprobs"][0] == -1.25


def test_only_the_prompt_is_read_when_no_token_is_asked_for(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(" world"))
    answer = served.client().completions.create(model="scripted", prompt="hello", echo=True, logprobs=1, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "length")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_log_probs_and_token_ids(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script([70, 71], version=3)
    body = {"messages": ASK, "prompt_logprobs": 1, "return_token_ids": True}
    answer = post(served, "/v1/chat/completions", body)
    (submit,) = served.engine.wait_for(Submit)
    assert answer["prompt_token_ids"] == list(submit.prompt)
    assert answer["choices"][0]["token_ids"] == [70, 71]
    assert answer["choices"][0]["weights_versions"] == [3, 3]
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == len(submit.prompt) - 1
    own = others[0][str(submit.prompt[1])]
    assert (own["logprob"], own["rank"]) == (-0.5, None), "another token is likelier"
    chunks = events_of(served, "/v1/completions", {"prompt": [5, 6], "return_token_ids": True})
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [70, 71]
    chunks = events_of(served, "/v1/chat/completions", {"messages": ASK, "return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == list(submit.prompt)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == [70, 71]


def test_an_adapter_is_a_model(served: Served, encode: Encode) -> None:
    assert [model.id for model in served.client().models.list()] == ["scripted", "painter"]
    served.engine.answer = lambda _: Script(encode("hello"))
    answer = served.client().chat.completions.create(model="painter", messages=ASK)
    assert answer.model == "painter"
    assert served.engine.wait_for(Submit)[0].adapter == "painter"


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
        ({"guided_json": {"type": "array"}}, Grammar("json_schema", '{"type": "array"}')),
        ({"guided_json": '{"type":"array"}'}, Grammar("json_schema", '{"type":"array"}')),
        ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
        ({"guided_grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
        ({"guided_choice": ["yes", 'n"o']}, Grammar("lark", 'start: "yes" | "n\\"o"')),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"json": {"type": "null"}}}, Grammar("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("lark", "start: /a/")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
)
def test_what_an_answer_must_look_like(served: Served, body: dict[str, Any], grammar: Grammar | None) -> None:
    post(served, "/v1/chat/completions", {"messages": ASK, **body})
    assert served.engine.wait_for(Submit)[0].sampling.grammar == grammar


CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("in_piece", [1, 7, 1000])
def test_a_tool_call_streams(served: Served, encode: Encode, in_piece: int) -> None:
    served.engine.answer = lambda _: Script(encode(CALL), in_piece)
    stream = served.client().chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], stream=True)
    content, name, arguments, ids = "", "", [], []
    for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.index == 0
            assert call.function is not None
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments.append(call.function.arguments or "")
    assert (content, name, "".join(arguments)) == ("Let me see.", "weather", '{"city": "Köln"}')
    assert chunk.choices[0].finish_reason == "tool_calls"
    assert len(ids) == 1
    if in_piece == 1:
        assert len(arguments) > 5, "the arguments came as they were written"
    prompt = served.engine.wait_for(Submit)[0].prompt
    assert '"properties": {"city"' in post(served, "/detokenize", {"tokens": prompt})["prompt"]


def test_a_tool_call_that_is_not_streamed(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode(CALL.removeprefix("Let me see.")), 5)
    answer = served.client().chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
    conversation: Any = [*ASK, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    served.engine.forget()
    served.client().chat.completions.create(model="scripted", messages=conversation, tools=[WEATHER])
    prompt = post(served, "/detokenize", {"tokens": served.engine.wait_for(Submit)[0].prompt})["prompt"]
    assert "<tool_call>Köln</tool_call>" in prompt, "templates get arguments as objects"
    assert "<|im_start|>tool\nrain" in prompt


def test_tool_choice(served: Served, encode: Encode) -> None:
    client = served.client()
    served.engine.answer = lambda _: Script(encode('{"city": "Rome"}'), 3)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], tool_choice=named)
    calls: Any = answer.choices[0].message.tool_calls
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", '{"city": "Rome"}')
    served.engine.answer = lambda _: Script(encode('[{"name": "weather", "arguments": {"city": "Rome"}}]'), 3)
    answer = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", '{"city": "Rome"}')
    served.engine.answer = lambda _: Script(encode(CALL), 3)
    answer = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    submits = served.engine.wait_for(Submit, 3)
    grammars = [submit.sampling.grammar for submit in submits]
    assert grammars[0] is not None
    assert json.loads(grammars[0].text) == WEATHER["function"]["parameters"]
    assert grammars[1] is not None
    assert json.loads(grammars[1].text)["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    assert grammars[2] is None
    assert len(submits[2].prompt) < len(submits[1].prompt), "without tools the template does not show them"


def test_a_mark_that_is_a_special_token(start: Callable[..., Served], encode: Encode) -> None:
    served = start("--tool-parser", "llama3_json")
    tokens = encode('<|python_tag|>{"name": "search", "parameters": {"query": "fox"}}')
    served.engine.answer = lambda _: Script(tokens)
    message = post(served, "/v1/chat/completions", {"messages": ASK, "tools": [WEATHER]})["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "fox"}'}
    message = post(served, "/v1/chat/completions", {"messages": ASK})["choices"][0]["message"]
    assert message["content"] == '{"name": "search", "parameters": {"query": "fox"}}'


def test_reasoning_comes_apart(start: Callable[..., Served], encode: Encode) -> None:
    served = start("--reasoning-parser", "think")
    served.engine.answer = lambda _: Script(encode("Why? 👧\n</think>\n\nIt is 4."))
    body = {"messages": ASK, "chat_template_kwargs": {"think": True}}
    message = post(served, "/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Why? 👧", "It is 4.")
    prompt = served.engine.wait_for(Submit)[0].prompt
    assert post(served, "/detokenize", {"tokens": prompt})["prompt"].endswith("assistant\n<think>\n")
    deltas = [chunk["choices"][0]["delta"] for chunk in events_of(served, "/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Why? 👧"
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4."


def test_tokens_are_all_that_is_needed(start: Callable[..., Served]) -> None:
    served = start("--served-name", "numbers", has_folder=False)
    served.engine.answer = lambda _: Script([1, 2, 3])
    answer = post(
        served, "/v1/completions", {"model": "numbers", "prompt": [5], "return_token_ids": True, "logprobs": 0}
    )
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5, -0.5]
    refused = requests.post(served.url + "/v1/completions", json={"prompt": "hello"}, timeout=SECONDS)
    assert (refused.status_code, "token ids" in refused.json()["error"]["message"]) == (400, True)


def test_tokenize_and_detokenize(served: Served, encode: Encode) -> None:
    found = post(served, "/tokenize", {"prompt": "hello 👧", "return_token_strs": True})
    assert (found["tokens"], found["count"]) == (encode("hello 👧"), len(encode("hello 👧")))
    assert (found["max_model_len"], found["token_strs"][0]) == (MAX_LENGTH, "he")
    chat = post(served, "/tokenize", {"messages": ASK, "add_generation_prompt": False})
    assert chat["tokens"] == encode("<|im_start|>user\nhello<|im_end|>\n")
    open_chat = {
        "messages": [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    chat = post(served, "/tokenize", open_chat)
    assert chat["tokens"] == encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nIt is ")
    assert post(served, "/detokenize", {"tokens": found["tokens"]})["prompt"] == "hello 👧"
    assert set(requests.get(served.url + "/version", timeout=SECONDS).json()) == {"version"}
