"""Strategies over HTTP, with a real engine and real verifiers: answers, bounds, and what hostile requests get."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from scripted_engine import SECONDS, Served
from test_server_answers import ASK, events_of, post
from threaded_engine import ThreadedEngine
from waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_N = 64
VERIFIERS = {
    "letter": {"verifier": "regex", "pattern": "e"},
    "right": {"verifier": "exact"},
    "slow": {"python": "slow_verifier:score"},
    "secretive": {"python": "slow_verifier:fail"},
}
SLOW = """
import time

def score(prompt, completion, row, transcript):
    while completion == row.get("hang_on"):
        time.sleep(1)
    return len(completion)

def fail(prompt, completion, row, transcript):
    raise RuntimeError("the password of https://judge.internal is swordfish")
"""
FULL_VOTE = {"kind": "vote", "n": 6, "stop": "off"}
KINDS: dict[str, Any] = {
    "vote": {"kind": "vote", "n": 6, "answer": "text"},
    "best_of": {"kind": "best_of", "n": 4, "score": "letter"},
    "beam": {"kind": "beam", "n": 2, "width": 2, "depth": 3, "step": {"tokens": 4}, "score": "letter"},
    "tree": {"kind": "tree", "n": 6, "width": 2, "depth": 3, "step": {"tokens": 4}},
    "budget": {"kind": "budget", "at_least": 3, "at_most": 5},
}


def serve(engine: ThreadedEngine, model_folder: Path, code_folder: Path, **keys: Any) -> Served:
    code_folder.joinpath("slow_verifier.py").write_text(SLOW, encoding="utf-8")
    section = {
        "verifiers": VERIFIERS,
        "verify": {"limit": 2.0, "workers": 2},
        "strategies": {"max_n": MAX_N, "max_seconds": SECONDS},
        **keys,
    }
    options = ("--model-folder", str(model_folder), "--strategies", json.dumps(section))
    return Served(engine, *options, environment={"CRATON_JOB_FOLDER": str(code_folder)})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> ThreadedEngine:
    return ThreadedEngine()


@pytest.fixture(scope="module")
def thoughtful(
    engine: ThreadedEngine, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    served = serve(engine, model_folder, tmp_path_factory.mktemp("code"))
    yield served
    served.stop()


def ask(served: Served, path: str = CHAT, **fields: Any) -> Any:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "hello"}
    return post(served, path, {**prompt, "max_tokens": 12, "seed": 5, **fields})


def refusal(served: Served, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "hello"}
    answer = requests.post(served.url + path, json={**prompt, "max_tokens": 12, **fields}, timeout=SECONDS)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    return error


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_vote_chooses_among_the_samples_of_its_seed(thoughtful: Served, path: str) -> None:
    answer = ask(thoughtful, path, strategy={"kind": "vote", "n": 4, "stop": "off", "answer": "text"})
    samples = ask(thoughtful, path, n=4)
    texts = [text_of({"choices": [choice]}) for choice in samples["choices"]]
    assert text_of(answer) in texts
    assert answer["strategy"]["samples"] == answer["strategy"]["n"] == 4
    assert sum(answer["strategy"]["votes"].values()) + answer["strategy"]["without_answer"] == 4
    usage, details = answer["usage"], answer["usage"]["completion_tokens_details"]
    assert usage["completion_tokens"] == samples["usage"]["completion_tokens"]
    assert details["chosen_tokens"] + details["discarded_tokens"] == usage["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_shows_progress_and_then_the_same_answer(thoughtful: Served, kind: str) -> None:
    whole = ask(thoughtful, strategy=KINDS[kind], return_token_ids=True)
    body = {"messages": ASK, "max_tokens": 12, "seed": 5, "strategy": KINDS[kind]}
    events = events_of(thoughtful, CHAT, {**body, "stream_options": {"include_usage": True}})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text_of(whole)
    reports = [event["strategy"] for event in events if "strategy" in event]
    assert reports[-1] == whole["strategy"]
    counts = [report["samples"] for report in reports]
    assert counts == sorted(counts)
    assert events[-1]["usage"] == whole["usage"]
    chunks = thoughtful.client().chat.completions.create(
        model="little", messages=ASK, max_tokens=12, seed=5, stream=True, extra_body={"strategy": KINDS[kind]}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole), "a plain client"


def rounded(report: dict[str, Any]) -> dict[str, Any]:
    """A report whose scores are rounded: in another batch their last digits differ."""
    return {**report, "scores": [round(score, 4) for score in report.get("scores", ())]}


def test_equal_seeds_give_equal_answers_after_a_restart(
    thoughtful: Served, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second server also has a default, which requests use, override or switch off."""
    answers = {kind: ask(thoughtful, strategy=strategy) for kind, strategy in KINDS.items()}
    another = ask(thoughtful, strategy=KINDS["vote"], seed=6)
    assert text_of(another) != text_of(answers["vote"])
    folder, verifiers = tmp_path_factory.mktemp("code"), {"letter": VERIFIERS["letter"]}
    restarted = serve(ThreadedEngine(), model_folder, folder, strategy=KINDS["best_of"], verifiers=verifiers)
    try:
        for kind, strategy in KINDS.items():
            again = ask(restarted, strategy=strategy)
            assert again["choices"] == answers[kind]["choices"], kind
            assert rounded(again["strategy"]) == rounded(answers[kind]["strategy"])
        assert rounded(ask(restarted)["strategy"]) == rounded(answers["best_of"]["strategy"])
        for off in ("none", {"kind": "none"}):
            assert "strategy" not in ask(restarted, strategy=off)
        assert len(ask(restarted, n=2)["choices"]) == 2, "what no strategy goes with is answered without one"
    finally:
        restarted.stop()


def test_the_best_of_n_by_a_verifier(thoughtful: Served) -> None:
    samples = [text_of({"choices": [choice]}) for choice in ask(thoughtful, n=4)["choices"]]
    answer = ask(thoughtful, strategy={"kind": "best_of", "n": 4, "score": "letter"})
    assert answer["strategy"]["scores"] == [float("e" in sample) for sample in samples]
    right = ask(thoughtful, strategy={"kind": "best_of", "n": 4, "score": "right"}, verifier_row={"answer": samples[2]})
    assert text_of(right) == samples[2]
    assert right["strategy"]["scores"] == [float(sample.strip() == samples[2].strip()) for sample in samples]


def test_a_hung_verifier_costs_its_sample_the_score(thoughtful: Served) -> None:
    samples = [text_of({"choices": [choice]}) for choice in ask(thoughtful, n=3)["choices"]]
    strategy = {"kind": "best_of", "n": 3, "score": "slow"}
    answer = ask(thoughtful, strategy=strategy, verifier_row={"hang_on": samples[1]})
    assert answer["strategy"]["scores"] == [len(samples[0]), None, len(samples[2])]
    assert text_of(answer) == max((samples[0], samples[2]), key=len)
    metrics = requests.get(f"{thoughtful.url}/metrics", timeout=SECONDS).text
    assert 'craton_serve_verifier_failures_total{model_name="little",verifier="slow"} 1.0' in metrics


def test_why_a_verifier_fails_is_not_for_clients(thoughtful: Served) -> None:
    strategy = {"kind": "best_of", "n": 2, "score": "secretive"}
    body = {"messages": ASK, "max_tokens": 4, "strategy": strategy}
    answer = requests.post(thoughtful.url + CHAT, json=body, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "no_score")
    assert "no sample got a score from 'secretive'" in answer.json()["error"]["message"]
    assert "swordfish" not in answer.text
    assert "judge.internal" not in answer.text


def test_a_thinking_budget_is_kept_exactly(thoughtful: Served) -> None:
    answer = ask(thoughtful, strategy={"kind": "budget", "at_least": 5, "at_most": 5}, return_token_ids=True)
    assert answer["strategy"]["thinking_tokens"] == 5
    assert answer["choices"][0]["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens"] <= 12


def test_stop_strings_and_formats_hold_for_the_samples(thoughtful: Served) -> None:
    text = text_of(ask(thoughtful, COMPLETIONS, strategy={"kind": "best_of", "n": 1}))
    stop = text[3:5]
    stopped = ask(thoughtful, COMPLETIONS, strategy={"kind": "best_of", "n": 1}, stop=stop)
    assert (text_of(stopped), stopped["choices"][0]["finish_reason"]) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ({"kind": "vote", "n": 0}, "strategy.n"),
        ({"kind": "vote", "n": 10_000}, "strategy.n"),
        ({"kind": "vote", "n": MAX_N + 1}, "strategy.n"),
        ({"kind": "vote", "n": "many"}, "strategy.n"),
        ({"kind": "vote", "n": 1.5}, "strategy.n"),
        ({"kind": "vote", "n": [1]}, "strategy.n"),
        ({"kind": "beam", "n": 40, "width": 40}, "strategy.n"),
        ({"kind": "vote", "max_seconds": 1e9}, "strategy.max_seconds"),
        ({"kind": "vote", "max_dollars": 1}, "strategy.max_dollars"),
        ({"kind": "wote"}, "strategy.kind"),
        ({}, "strategy"),
        ([1], "strategy"),
        ("vote:16:17:18", "strategy"),
        ({"kind": "vote", "strategy": {"kind": "vote"}}, "strategy"),
        ({"kind": "vote", "answer": {"kind": "vote"}}, "strategy.answer"),
        ({"kind": "budget", "at_least": 9, "at_most": 5}, "strategy.at_most"),
        ({"kind": "budget", "at_least": 50}, "strategy.at_least"),
        ({"kind": "best_of", "score": "unknown"}, "strategy.score"),
        ({"kind": "best_of", "score": "os:system"}, "strategy.score"),
        ({"kind": "best_of", "score": "/etc/passwd"}, "strategy.score"),
        ({"kind": "best_of", "score": "http://127.0.0.1:9"}, "strategy.score"),
        ({"kind": "best_of", "score": {"python": "os:system"}}, "strategy.score.python"),
        ({"kind": "best_of", "python": "os:system"}, "strategy.python"),
        ({"kind": "best_of", "sandbox": "off"}, "strategy.sandbox"),
        ({"kind": "best_of", "code": "print()"}, "strategy.code"),
        ({"kind": "best_of", "endpoint": {"url": "http://127.0.0.1:9"}}, "strategy.endpoint"),
        ({"kind": "vote", "answer": {"regex": "a{99999999999999999999}"}}, "strategy.answer"),
        ({"kind": "vote", "answer": {"regex": "a" * 100_000}}, "strategy.answer.regex"),
        ({"kind": "vote", "answer": {"regex": "("}}, "strategy.answer"),
        ({"kind": "vote", "answer": json.loads("[" * 60 + "]" * 60)}, "strategy"),
        ({f"key{number}": 1 for number in range(1000)}, "strategy"),
    ],
)
def test_hostile_strategies_are_refused_by_their_field(thoughtful: Served, strategy: Any, name: str) -> None:
    error = refusal(thoughtful, strategy=strategy)
    assert str(error["param"]).startswith(name), error
    assert len(error["message"]) < 1000


def test_deep_json_is_refused(thoughtful: Served) -> None:
    deep = '{"messages": [{"role": "user", "content": "x"}], "strategy": ' + "[" * 50_000 + "]" * 50_000 + "}"
    headers = {"Content-Type": "application/json"}
    answer = requests.post(thoughtful.url + CHAT, data=deep, headers=headers, timeout=SECONDS)
    assert answer.status_code == 400
    assert text_of(ask(thoughtful))


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"continue_from": [5]}, "continue_from"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"thinking_budget": 5}, "thinking_budget"),
        (CHAT, {"verifier_row": {"answer": "4"}}, "verifier_row"),
        (CHAT, {"verifier_row": {"answer": {"python": "os:system"}}}, "verifier_row"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_no_strategy_goes_with(thoughtful: Served, path: str, fields: dict[str, Any], name: str) -> None:
    error = refusal(thoughtful, path, **{"strategy": "vote:2", **fields})
    assert str(error["param"]).partition(".")[0] == name


def test_a_pattern_that_backtracks_holds_nobody_up(thoughtful: Served) -> None:
    strategy = {"kind": "vote", "n": 3, "stop": "off", "answer": {"regex": r"((.|..)+)+(?<=\x01)"}}
    answer = ask(thoughtful, strategy=strategy, max_tokens=100)
    report = answer["strategy"]
    assert report["without_answer"] >= 1, "the search for the pattern was given up"
    assert sum(report["votes"].values()) + report["without_answer"] == 3


def test_a_verifier_needs_the_row_that_it_compares_with(thoughtful: Served) -> None:
    error = refusal(thoughtful, strategy={"kind": "best_of", "n": 2, "score": "right"})
    assert error["param"] == "verifier_row"
    assert "answer" in error["message"]


@pytest.mark.parametrize("value", [{"python": "os:system"}, ["4"], "x" * 65_537])
def test_a_wrong_value_for_a_verifier_is_explained_in_plain_words(thoughtful: Served, value: object) -> None:
    error = refusal(thoughtful, CHAT, strategy="vote:2", verifier_row={"answer": value})
    assert error["param"] == "verifier_row.answer"
    allowed = "must be a text of at most 65,536 characters, a number, true, false or null"
    assert error["message"] == f"verifier_row.answer: {allowed}"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_disconnects_frees_all_samples(
    thoughtful: Served, engine: ThreadedEngine, is_stream: bool
) -> None:
    engine.hold(1000, tokens=4)
    try:
        body = json.dumps(
            {"messages": ASK, "max_tokens": 200, "stream": is_stream, "ignore_eos": True, "strategy": FULL_VOTE}
        )
        address = urlsplit(thoughtful.url)
        with socket.create_connection((address.hostname, address.port), SECONDS) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: engine.num_requests >= 3, "the samples run")
        wait_until(lambda: engine.num_requests == 0, "all samples are aborted")
    finally:
        engine.go_on()
    assert text_of(ask(thoughtful))


def test_metrics_count_strategies(thoughtful: Served) -> None:
    def value(name: str) -> float:
        text = requests.get(f"{thoughtful.url}/metrics", timeout=SECONDS).text
        found = re.search(rf"^craton_serve_{name} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    names = [
        'strategies_total{kind="vote",model_name="little"}',
        'strategy_samples_total{kind="vote",model_name="little"}',
        'strategy_tokens_total{fate="chosen",kind="vote",model_name="little"}',
        'strategy_tokens_total{fate="discarded",kind="vote",model_name="little"}',
        'strategy_limited_total{kind="vote",limit="tokens",model_name="little"}',
    ]
    before = [value(name) for name in names]
    answer = ask(thoughtful, strategy={"kind": "vote", "n": 6, "max_tokens": 30, "answer": "text"})
    assert answer["strategy"]["limited_by"] == "tokens"
    details = answer["usage"]["completion_tokens_details"]
    grown = [value(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [1, details["samples"], details["chosen_tokens"], details["discarded_tokens"], 1]
    assert answer["usage"]["completion_tokens"] <= 30
