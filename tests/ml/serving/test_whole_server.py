"""A real server on this machine, from a folder with a model to the `openai` client: agent, ranks, engine, front end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import requests
import torch
from model_pairs import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from craton.agent import free_port, run_secret
from craton.job import parse_job
from craton.ml.data.chat import ensure_template
from craton.ml.data.tokenizer import load_tokenizer, train_bpe
from craton.ml.models import Decoder, WeightsError, config_from_huggingface, load_weights
from craton.ml.serving.weights import send_weights
from craton.orchestration import draft_run, kill_run, living_agents, start_run, stop_run
from craton.telemetry import RunDirectory, read_lines

SECONDS = 90.0
LONGEST = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {SECONDS:.0f} s: {what}")


def make_model(folder: Path, seed: int) -> LlamaForCausalLM:
    train_bpe(["The quick brown fox says hello to the world. What is 2 + 2? It is 4.\n"] * 4, 300, folder)
    ensure_template(folder)
    vocabulary = load_tokenizer(folder).get_vocab_size()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": vocabulary})).eval()
    model.save_pretrained(folder)
    return model


@dataclass
class Server:
    run: RunDirectory
    url: str
    name: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False

    def admin(self, path: str, **body: Any) -> Any:
        response = requests.post(f"{self.url}{path}", json=body, timeout=SECONDS)
        assert response.status_code == 200, response.text
        return response.json()

    def rank_pids(self) -> dict[int, int]:
        lines = [line for path in (self.run.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
        return {line["rank"]: line["pid"] for line in lines if line["event"] == "rank_started"}

    def complete(self, prompt: list[int], count: int = 20, **others: Any) -> list[int]:
        """Greedy tokens after a prompt of tokens."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
        body |= {"ignore_eos": True, **others}
        response = requests.post(f"{self.url}/v1/completions", json=body, timeout=SECONDS)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])


@contextmanager
def serving(folder: Path, root: Path, name: str, tp: int = 1, more: str = "") -> Iterator[Server]:
    port = free_port()
    job = parse_job(
        f"name: {name}\nkind: serve\nmodel: {folder}\ncluster: local\nlayout: {{tp: {tp}}}\n"
        f"serve: {{port: {port}, precision: fp32, max_length: {LONGEST}, admin: true{more}}}\n"
    )
    run = start_run(draft_run(job, root / name, port=free_port()), root)
    server = Server(run, f"http://127.0.0.1:{port}", folder.name)
    try:
        wait_until(lambda: server.is_ready() or run.has("FATAL"), "the server is ready")
        assert not run.has("FATAL"), run.marker_text("FATAL")
        yield server
    finally:
        if living_agents(run):
            kill_run(run)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("folders") / "little"
    folder.mkdir()
    return make_model(folder, 1), folder


@pytest.fixture(scope="module")
def server(theirs: tuple[LlamaForCausalLM, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(theirs[1], tmp_path_factory.mktemp("runs"), "one") as server:
        yield server


pytestmark = pytest.mark.xdist_group("whole server")


def expect_like_theirs(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_tokens_are_those_of_transformers(server: Server, theirs: tuple[LlamaForCausalLM, Path]) -> None:
    prompt = [7, 100, 33, 250, 12, 12, 90]
    expect_like_theirs(theirs[0], prompt, server.complete(prompt))


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
    text = requests.get(f"{server.url}/metrics", timeout=5).text
    for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count", "craton_run_step_seconds"):
        (value,) = {line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)}
        assert float(value) > 0, name


def test_new_weights_from_a_folder_and_over_the_network(
    server: Server, theirs: tuple[LlamaForCausalLM, Path], tmp_path: Path
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


def test_sleep_and_wake(server: Server, theirs: tuple[LlamaForCausalLM, Path]) -> None:
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


def test_a_stop_drains(theirs: tuple[LlamaForCausalLM, Path], tmp_path: Path) -> None:
    with serving(theirs[1], tmp_path, "drained", more=", drain: 20s") as server:
        chunks = server.client().completions.create(
            model=server.name, prompt=[1, 2, 3], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        received = [next(chunks)]
        stop_run(server.run)
        received += list(chunks)
        assert received[-1].choices[0].finish_reason == "length"
        wait_until(lambda: not living_agents(server.run), "the agents end")
        assert not server.run.has("FATAL"), server.run.marker_text("FATAL")


@pytest.mark.slow
def test_a_lost_rank_ends_what_runs_and_the_server_comes_back(
    theirs: tuple[LlamaForCausalLM, Path], tmp_path: Path
) -> None:
    prompt = [5, 6, 7, 8]
    with serving(theirs[1], tmp_path, "two", tp=2) as server:
        expect_like_theirs(theirs[0], prompt, server.complete(prompt))
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
