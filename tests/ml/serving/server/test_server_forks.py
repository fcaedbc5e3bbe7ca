"""/v1/fork and /v1/abort: a client forks and aborts its running requests through the front end; a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from scripted_engine import SECONDS, Served
from threaded_engine import MAX_LENGTH, VOCABULARY, ThreadedEngine
from waiting import wait_until

PROMPT = [5, 17, 2, 80, 33, 9, 41]
ASK = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine() -> ThreadedEngine:
    return ThreadedEngine()


@pytest.fixture(scope="module")
def front(engine: ThreadedEngine, model_folder: Path) -> Iterator[Served]:
    served = Served(engine, "--model-folder", str(model_folder))  # type: ignore[arg-type]
    wait_until(lambda: requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 200, "it is ready")
    yield served
    served.stop()


@pytest.fixture(autouse=True)
def free(engine: ThreadedEngine) -> Iterator[None]:
    """Every test ends with an idle engine without a lost block."""
    yield
    engine.go_on()
    wait_until(lambda: engine.engine.is_idle, "the engine is idle")
    assert engine.engine.stats().blocks_used == 0


def post(front: Served, path: str, **body: Any) -> requests.Response:
    return requests.post(front.url + path, json=body, timeout=SECONDS)


class Stream:
    """A streamed request, event by event."""

    def __init__(self, front: Served, path: str = "/v1/completions", **body: Any) -> None:
        self._response = requests.post(front.url + path, json={**body, "stream": True}, stream=True, timeout=SECONDS)
        assert self._response.status_code == 200, self._response.text
        self._lines = self._response.iter_lines()
        self.choices: dict[int, list[Any]] = {}
        self.id = ""

    def read(self, count: int | None = None) -> Stream:
        """Read up to so many events, or to the end."""
        for line in self._lines:
            if line == b"data: [DONE]":
                break
            if line:
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                self.id = event["id"]
                self.choices.setdefault(event["choices"][0]["index"], []).append(event["choices"][0])
                count = None if count is None else count - 1
            if count == 0:
                break
        return self

    def tokens(self, index: int = 0) -> list[int]:
        first = self.choices[index][0].get("generated_token_ids", [])
        return [*first, *(token for choice in self.choices[index] for token in choice["token_ids"])]

    def text(self, index: int = 0) -> str:
        return "".join(choice["text"] for choice in self.choices[index])

    def close(self) -> None:
        self._response.close()


def whole(front: Served, **body: Any) -> Any:
    answer = post(front, "/v1/completions", **{**ASK, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("prefix", [[], [1, 2, 3]])
def test_branches_follow_the_tokens_before_the_fork(front: Served, engine: ThreadedEngine, prefix: list[int]) -> None:
    engine.hold(requests=3)
    parent = Stream(front, **ASK, continue_from=prefix).read(1)
    branches = [{"seed": 3}, {"seed": 8, "temperature": 0.5, "max_tokens": 30}]
    fork = Stream(front, "/v1/fork", id=parent.id, branches=branches, return_token_ids=True).read()
    parent.read()
    expected = whole(front, continue_from=prefix)
    assert parent.tokens() == expected["token_ids"]
    assert fork.tokens(0) == [*prefix, *expected["token_ids"]], "a branch with the same seed is the same answer"
    begun = fork.choices[1][0]["generated_token_ids"]
    rest = whole(front, continue_from=begun, seed=8, temperature=0.5, max_tokens=30)
    assert fork.tokens(1) == [*begun, *rest["token_ids"]]
    assert fork.text(1) == rest["text"]
    assert (fork.choices[1][0]["seed"], fork.choices[1][-1]["finish_reason"]) == (8, "length")


def test_a_fork_without_a_stream_is_one_body(front: Served, engine: ThreadedEngine) -> None:
    engine.hold(requests=3)
    parent = Stream(front, **ASK, logprobs=0).read(1)
    answer = post(front, "/v1/fork", id=parent.id, branches=[{}, {"max_tokens": 50}], logprobs=1)
    parent.close()
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["seed"] != choices[1]["seed"], "seeds are drawn"
    assert all(len(top) == 1 for top in choices[1]["logprobs"]["top_logprobs"])
    assert answer.json()["usage"]["prompt_tokens"] == 0, "the prompt is in the usage of the parent"


def test_one_choice_is_aborted_and_the_others_go_on(front: Served, engine: ThreadedEngine) -> None:
    engine.hold()
    parent = Stream(front, **ASK, n=3).read(3)
    assert post(front, "/v1/abort", id=parent.id, index=1).json() == {"id": parent.id, "aborted": 1}
    engine.go_on()
    parent.read()
    last = parent.choices[1][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "abort")
    assert len(parent.tokens(1)) < 40
    assert (parent.tokens(0), parent.tokens(2)) == (whole(front)["token_ids"], whole(front, seed=5)["token_ids"])


def test_a_whole_request_is_aborted(front: Served, engine: ThreadedEngine) -> None:
    engine.hold()
    parent = Stream(front, **ASK, n=2).read(2)
    assert post(front, "/v1/abort", id=parent.id).json()["aborted"] == 2
    parent.read()
    assert [parent.choices[index][-1]["stop_reason"] for index in (0, 1)] == ["abort", "abort"]


def test_a_client_that_leaves_aborts_its_branches_only(front: Served, engine: ThreadedEngine) -> None:
    engine.hold(requests=3)
    parent = Stream(front, **ASK).read(1)
    fork = Stream(front, "/v1/fork", id=parent.id, branches=[{"max_tokens": 240}] * 2)
    engine.hold()
    fork.close()
    wait_until(lambda: engine.num_requests <= 1, "the branches are gone")
    engine.go_on()
    assert parent.read().tokens() == whole(front)["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/fork", {"id": "cmpl-0"}, 404, "no running request has the id 'cmpl-0'"),
        ("/v1/abort", {"id": "cmpl-0"}, 404, "no running request has the id 'cmpl-0'"),
        ("/v1/fork", {"id": "x" * 129}, 400, "id: String should have at most 128 characters"),
        ("/v1/fork", {"id": 7}, 400, "id: Input should be a valid string"),
        ("/v1/fork", {"index": 1}, 400, "has 1 choices, and index is 1"),
        ("/v1/abort", {"index": 5}, 400, "has 1 choices, and index is 5"),
        ("/v1/fork", {"index": -1}, 400, "index: Input should be greater than or equal to 0"),
        ("/v1/fork", {"branches": []}, 400, "branches: List should have at least 1 item"),
        ("/v1/fork", {"branches": [{}] * 129}, 400, "branches: List should have at most 128 items"),
        ("/v1/fork", {"branches": [{"temperature": -1}]}, 400, "temperature: Input should be greater"),
        ("/v1/fork", {"branches": [{"temprature": 1}]}, 400, "did you mean 'temperature'?"),
        ("/v1/fork", {"branches": [{"max_tokens": MAX_LENGTH}]}, 400, "lower max_tokens to 249 or less"),
        ("/v1/fork", {"branches": [{"max_tokens": 1}]}, 400, "give the fork a larger max_tokens"),
        ("/v1/fork", {"branches": [{"min_tokens": 41}]}, 400, "min_tokens 41 exceeds max_tokens 40"),
        ("/v1/fork", {"branches": [{"logit_bias": {"x": 1}}]}, 400, "logit_bias has 'x'"),
        ("/v1/fork", {"branches": [{"stop_token_ids": [VOCABULARY]}]}, 400, "not in the model's vocabulary"),
        ("/v1/fork", {"branche": [{}], "branches": [{}]}, 400, "did you mean 'branches'?"),
    ],
)
def test_bad_input_is_refused_and_the_request_goes_on(
    front: Served, engine: ThreadedEngine, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    engine.hold()
    parent = Stream(front, **ASK).read(1)
    filled = {"id": parent.id, **({"branches": [{}]} if path == "/v1/fork" else {}), **body}
    answer = post(front, path, **filled)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    engine.go_on()
    assert len(parent.read().tokens()) == 40


def test_an_ended_choice_and_a_chat_cannot_be_forked(front: Served, engine: ThreadedEngine) -> None:
    engine.hold()
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "seed": 3, "ignore_eos": True}
    parent = Stream(front, "/v1/chat/completions", **chat).read(1)
    answer = post(front, "/v1/fork", id=parent.id, branches=[{}])
    assert (answer.status_code, "only completions can be forked" in answer.text) == (400, True)
    assert post(front, "/v1/abort", id=parent.id).status_code == 200
    engine.go_on()
    ended = Stream(front, **ASK).read()
    assert post(front, "/v1/fork", id=ended.id, branches=[{}]).status_code == 404


def test_the_model_says_which_version_of_its_weights_it_has(front: Served, engine: ThreadedEngine) -> None:
    card = requests.get(f"{front.url}/v1/models", timeout=SECONDS).json()["data"][0]
    assert card["weights_version"] == engine.engine.version == 0
