"""A real server on this machine, from a folder with a model to the `openai` client: agent, ranks, engine, front end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import requests
import schemathesis
import torch
from hung_rank import IDLE_REPORTS
from hypothesis import HealthCheck, Phase, given, settings
from listeners import LOOPBACK, listeners_of, processes_with
from live_server import SECONDS, Server, make_model, serving
from schemathesis import GenerationMode
from transformers import PreTrainedModel
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import newest_generation
from craton.agent.coordination import run_secret
from craton.agent.processes import free_port
from craton.job import parse_job
from craton.ml.models import Decoder, WeightsError, config_from_huggingface, load_weights
from craton.ml.serving.device.weights import send_weights
from craton.orchestration import living_agents
from craton.orchestration.draft import draft_run
from craton.orchestration.start import kill_run, start_run, stop_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("folders") / "little"
    folder.mkdir()
    return make_model(folder, 1), folder


@pytest.fixture(scope="module")
def server(theirs: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        theirs[1], tmp_path_factory.mktemp("runs"), "one", more=", drain: 20s, strategies: {max_n: 8}"
    ) as server:
        yield server


pytestmark = pytest.mark.xdist_group("whole server")


@pytest.fixture(scope="module", autouse=True)
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """A server that hangs, begun before the first test, so that what it waits for happens beside them."""
    root = tmp_path_factory.mktemp("runs")
    command = shlex.join([sys.executable, str(Path(__file__).with_name("hung_rank.py"))])
    job = parse_job(f"name: hung\nkind: command\ncommand: {command}\ncluster: local x 1\n")
    run = start_run(draft_run(job, root / "hung", port=free_port()), root)
    yield run
    if living_agents(run):
        kill_run(run)


def expect_like_theirs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_tokens_are_those_of_transformers(server: Server, theirs: tuple[PreTrainedModel, Path]) -> None:
    prompt = [7, 100, 33, 250, 12, 12, 90]
    expect_like_theirs(theirs[0], prompt, server.complete(prompt))


def test_a_strategy_runs_within_the_bounds_of_the_job(server: Server) -> None:
    body = {"prompt": "What is 2 + 2?", "max_tokens": 8, "seed": 3, "strategy": {"kind": "best_of", "n": 4}}
    answers = [requests.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert (answers[0]["strategy"]["samples"], len(answers[0]["strategy"]["scores"])) == (4, 4)
    refused = requests.post(f"{server.url}/v1/completions", json={**body, "strategy": "vote:9"}, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "strategy.n")


def test_a_chat_that_is_streamed_says_what_one_that_is_not_does(server: Server) -> None:
    client = server.client()
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    arguments: dict[str, Any] = {"model": server.name, "messages": question, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert finishes == [whole.choices[0].finish_reason]


def test_an_answer_fits_its_schema(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model=server.name,
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=150,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_a_schema_that_is_none_is_refused_and_others_go_on(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"schema|type"):
        server.client().chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "Who?"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )
    assert server.complete([1, 2, 3], 4)


def test_a_prefix_is_found_again(server: Server) -> None:
    text = "The quick brown fox says hello to the world. " * 4
    create = server.client().completions.create
    create(model=server.name, prompt=text, max_tokens=2)
    again = create(model=server.name, prompt=text + "What", max_tokens=2)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


@pytest.mark.slow
def test_two_hundred_clients_at_once(server: Server) -> None:
    found: list[int] = []

    def ask(number: int) -> None:
        chunks = server.client().completions.create(
            model=server.name, prompt=[number, 5, 6], max_tokens=6, stream=True, extra_body={"ignore_eos": True}
        )
        found.append(sum(1 for _ in chunks))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == 200
    assert server.is_ready()


def test_metrics_of_a_server_that_works(server: Server) -> None:
    server.complete([4, 5, 6], 30)
    text = requests.get(f"{server.url}/metrics", timeout=PATIENCE_SECONDS).text
    for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count", "craton_run_step_seconds"):
        (value,) = {line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)}
        assert float(value) > 0, name


def test_latencies_and_the_kv_cache_are_recorded_in_the_run(server: Server) -> None:
    """The page shows them when the server is gone."""
    server.complete([4, 5, 6], 30)
    names = {f"serve_{name}_seconds{end}" for name in ("first_token", "inter_token", "queue") for end in ("", "_p95")}

    def is_recorded() -> bool:
        lines, _ = read_lines(server.run.metrics_path("node-0"))
        return any(names | {"serve_kv_share", "serve_preemptions"} <= line.keys() for line in lines)

    wait_until(is_recorded, "the server records latencies")


def test_new_weights_from_a_folder_and_over_the_network(
    server: Server, theirs: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    prompt = [9, 8, 7, 200, 150]
    other = make_model(tmp_path, 2)
    assert server.admin("/update_weights", folder=str(tmp_path))["result"]["version"] == 1
    expect_like_theirs(other, prompt, server.complete(prompt))

    config = config_from_huggingface(theirs[1])
    model = Decoder(config)
    load_weights(model, theirs[1])
    address = f"127.0.0.1:{free_port()}"
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.admin("/update_weights", address=address)))
    thread.start()
    state = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    wait_until(lambda: _sent(address, run_secret(server.run), state), "the server receives weights")
    thread.join(SECONDS)
    assert answers[0]["result"]["version"] == 7
    expect_like_theirs(theirs[0], prompt, server.complete(prompt))


def _sent(address: str, key: bytes, state: list[tuple[str, torch.Tensor]]) -> bool:
    try:
        send_weights(address, key, state, version=7)
    except WeightsError:  # it does not listen yet
        return False
    return True


@pytest.mark.slow
def test_sleep_and_wake(server: Server, theirs: tuple[PreTrainedModel, Path]) -> None:
    prompt = [9, 8, 7, 200, 151]
    server.admin("/sleep")
    with pytest.raises(AssertionError, match="asleep"):
        server.admin("/update_weights", folder=str(theirs[1]))
    server.admin("/wake_up")
    expect_like_theirs(theirs[0], prompt, server.complete(prompt))
    server.admin("/sleep?level=2")
    server.admin("/wake_up?tags=weights")
    server.admin("/update_weights", folder=str(theirs[1]))
    server.admin("/wake_up?tags=kv_cache")
    expect_like_theirs(theirs[0], prompt, server.complete(prompt))


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/v1/completions", "/tokenize", "/detokenize")),
    ],
)
def test_fuzzed_requests_leave_the_server_alive(server: Server, path: str, mode: GenerationMode) -> None:
    """The same requests each time; the front end's own tests have more of them, with a scripted engine."""
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    @settings(
        max_examples=8,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path]["POST"].as_strategy(mode))
    def answers(case: schemathesis.Case) -> None:
        status = case.call(timeout=SECONDS).status_code
        assert status < 500 or status == 503

    answers()
    assert server.is_ready()
    assert len(server.complete([5, 6, 7], 3)) == 3


def test_a_deep_sleep_is_not_ready_and_waking_says_what_is_missing(
    server: Server, theirs: tuple[PreTrainedModel, Path]
) -> None:
    server.admin("/sleep?level=2")
    health = requests.get(f"{server.url}/health", timeout=SECONDS)
    assert (health.status_code, health.json()["status"]) == (503, "asleep")
    woken = server.admin("/wake_up")
    assert woken["status"] == "without weights"
    assert "POST /update_weights" in woken["missing"]["weights"]
    health = requests.get(f"{server.url}/health", timeout=SECONDS)
    assert (health.status_code, health.json()["status"]) == (503, "without weights")
    assert requests.get(f"{server.url}/live", timeout=SECONDS).status_code == 200
    server.admin("/update_weights", folder=str(theirs[1]))
    assert server.is_ready()
    assert len(server.complete([5, 6, 7], 3)) == 3


def test_a_stop_drains(server: Server) -> None:
    """The last test of the server that all before it share."""
    chunks = server.client().completions.create(
        model=server.name, prompt=[1, 2, 3], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    received = [next(chunks)]
    stop_run(server.run)
    received += list(chunks)
    assert received[-1].choices[0].finish_reason == "length"
    wait_until(lambda: not living_agents(server.run), "the agents end")
    assert not server.run.has("FATAL"), server.run.marker_text("FATAL")
    log = (server.run.path / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    assert "leaked" not in log, "nothing is left to be complained of at a normal stop"


def test_a_step_that_never_returns_is_ended_and_an_idle_engine_is_not(hung: RunDirectory) -> None:
    wait_until(lambda: hung.has("DONE") or hung.has("FATAL"), "its second life ends well")
    log = hung.log_path(0).read_text()
    assert hung.has("DONE"), log
    newest = newest_generation(hung)
    assert newest is not None
    assert newest.number == 1, f"it was ended once, and not while it had nothing to do: {newest.reason}"
    assert newest.reason.startswith("rank 0 hangs in productive")
    assert f"asked after {IDLE_REPORTS} reports" in log


@pytest.mark.slow
def test_a_lost_rank_ends_what_runs_and_the_server_comes_back(
    theirs: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    prompt = [5, 6, 7, 8]
    with serving(theirs[1], tmp_path, "two", tp=2) as server:
        expect_like_theirs(theirs[0], prompt, server.complete(prompt))
        found = listeners_of(processes_with(server.run.path))
        assert len(found) >= 5, "the API, the agent, its metrics, the store, and gloo"
        assert {address for address, _ in found} <= LOOPBACK, found
        chunks = server.client().completions.create(
            model=server.name, prompt=[1, 2, 3], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(chunks)
        os.kill(server.rank_pids()[1], signal.SIGKILL)
        with pytest.raises((openai.APIError, requests.RequestException)):
            for _ in chunks:
                pass
        wait_until(lambda: not server.is_ready(), "the server is away")
        wait_until(server.is_ready, "the server is back")
        expect_like_theirs(theirs[0], prompt, server.complete(prompt))
        stop_run(server.run)
        wait_until(lambda: not living_agents(server.run), "the agents end")
        assert not server.run.has("FATAL"), server.run.marker_text("FATAL")


@pytest.mark.slow
def test_a_server_whose_ranks_split_the_experts(tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]
    old, new = (make_model(tmp_path / name, seed, "mixtral") for seed, name in enumerate(("old", "new")))
    with serving(tmp_path / "old", tmp_path, "split", tp=2, ep=2) as server:
        first = server.complete(prompt)
        expect_like_theirs(old, prompt, first)
        server.admin("/sleep")
        server.admin("/wake_up")
        assert server.complete(prompt) == first
        server.admin("/update_weights", folder=str(tmp_path / "new"))
        second = server.complete(prompt)
        assert second != first
        expect_like_theirs(new, prompt, second)


@pytest.mark.slow
def test_a_server_that_is_stopped_comes_back(theirs: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]
    with serving(theirs[1], tmp_path, "stopped") as server:
        expected = server.complete(prompt)
        first = server.rank_pids()[0]
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: server.rank_pids()[0] != first, "the agent starts another rank")
        wait_until(server.is_ready, "the server is back")
        assert server.complete(prompt) == expected
        newest = newest_generation(server.run)
        assert newest is not None
        assert newest.reason.startswith("rank 0 is stopped by a signal")
