"""Reward models at the server: a real front end, engine and reward process, which is killed and stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from model_pairs import SIZES
from scripted_engine import SECONDS, Served
from test_server_answers import ASK
from threaded_engine import ThreadedEngine
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = SECONDS  # of a sample; the test of a stopped process sets a lower one
WEIGHT = 2.0
KINDS: dict[str, dict[str, Any]] = {
    "best_of": {"kind": "best_of", "n": 4},
    "beam": {"kind": "beam", "n": 2, "width": 2, "depth": 3, "step": {"tokens": 4}},
    "tree": {"kind": "tree", "n": 6, "width": 2, "depth": 3, "step": {"tokens": 4}},
}


@pytest.fixture(scope="module")
def reward_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the vocabulary and the chat template of the served one."""
    folder = tmp_path_factory.mktemp("reward")
    for file in model_folder.iterdir():
        shutil.copy(file, folder)
    torch.manual_seed(3)
    config = LlamaConfig(**{**SIZES, "vocab_size": 320, "num_labels": 1, "pad_token_id": None})
    model = LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


def served_with(engine: ThreadedEngine, model_folder: Path, reward: Path, **verify: Any) -> Served:
    section = {
        "verifiers": {"rm": {"model": str(reward), "weight": WEIGHT}, "letter": {"verifier": "regex", "pattern": "e"}},
        "verify": {"limit": LIMIT, **verify},
        "strategies": {"max_seconds": SECONDS},
    }
    options = ("--model-folder", str(model_folder), "--strategies", json.dumps(section))
    return Served(engine, *options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> ThreadedEngine:
    return ThreadedEngine()


@pytest.fixture(scope="module")
def server(engine: ThreadedEngine, model_folder: Path, reward_folder: Path) -> Iterator[Served]:
    served = served_with(engine, model_folder, reward_folder)
    yield served
    served.stop()


def ask(served: Served, path: str = CHAT, **fields: Any) -> requests.Response:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "hello"}
    return requests.post(served.url + path, json={**prompt, "max_tokens": 12, "seed": 5, **fields}, timeout=SECONDS)


def texts_of(served: Served, path: str, n: int) -> list[str]:
    choices = ask(served, path, n=n).json()["choices"]
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]


def scores_of_transformers(folder: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            float(model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits)
            for text in texts
        ]


def reward_processes(served: Served) -> list[psutil.Process]:
    """The processes of the reward models, in the order in which they were started."""
    found = [
        child
        for child in psutil.Process(served.process.pid).children()
        if any("reward_process" in part for part in child.cmdline())
    ]
    return sorted(found, key=lambda process: process.create_time())


def metric(served: Served, name: str, verifier: str) -> float:
    text = requests.get(f"{served.url}/metrics", timeout=SECONDS).text
    found = re.search(rf'^craton_serve_{name}_total{{.*verifier="{verifier}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_scores_are_those_of_transformers_on_the_text_of_the_training(
    server: Served, reward_folder: Path, path: str
) -> None:
    texts = texts_of(server, path, 4)
    if path == CHAT:
        tokenizer = AutoTokenizer.from_pretrained(reward_folder)
        answers = [[*ASK, {"role": "assistant", "content": text}] for text in texts]
        whole = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in answers]
    else:
        whole = [f"hello{text}<|endoftext|>" for text in texts]
    wanted = [WEIGHT * score for score in scores_of_transformers(reward_folder, whole)]
    before = metric(server, "verifier_scores", "rm")
    answer = ask(server, path, strategy={"kind": "best_of", "n": 4, "score": "rm"}).json()
    assert answer["strategy"]["scores"] == pytest.approx(wanted, abs=1e-4)
    assert len(set(answer["strategy"]["scores"])) == 4, "the scores tell the texts apart"
    choice = answer["choices"][0]
    best = texts[wanted.index(max(wanted))]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == best
    assert metric(server, "verifier_scores", "rm") == before + 4


@pytest.mark.parametrize("kind", KINDS)
def test_strategies_are_guided_by_a_reward_model(server: Served, kind: str) -> None:
    report = ask(server, strategy={**KINDS[kind], "score": "rm"}).json()["strategy"]
    assert report["without_score"] == 0
    assert all(isinstance(score, float) for score in report["scores"])


def test_many_requests_at_once_have_the_scores_of_one(server: Served) -> None:
    strategy = {"kind": "best_of", "n": 3, "score": "rm"}
    alone = ask(server, strategy=strategy).json()["strategy"]["scores"]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda _: ask(server, strategy=strategy).json()["strategy"]["scores"], range(8)))
    for scores in together:
        assert scores == pytest.approx(alone, abs=1e-4)


def test_content_in_parts_is_joined_and_token_ids_are_refused(server: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]}]
    strategy = {"kind": "best_of", "n": 2, "score": "rm"}
    joined = ask(server, messages=[{"role": "user", "content": "Say hello"}], strategy=strategy).json()["strategy"]
    scores = ask(server, messages=parts, strategy=strategy).json()["strategy"]["scores"]
    assert scores == pytest.approx(joined["scores"], abs=1e-4)
    refused = ask(server, COMPLETIONS, prompt=[5, 6, 7], strategy=strategy)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


def test_a_killed_process_is_started_again_and_its_texts_are_scored_once_more(
    server: Served, engine: ThreadedEngine
) -> None:
    strategy = {"kind": "best_of", "n": 3, "score": "rm"}
    scores = ask(server, strategy=strategy).json()["strategy"]["scores"]
    victim = reward_processes(server)[0]
    victim.suspend()  # so that the texts are not scored when it dies
    engine.hold(1000, tokens=4)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, server, strategy=strategy)
        wait_until(lambda: engine.num_requests == 3, "the samples run")
        engine.go_on()
        wait_until(lambda: engine.num_requests == 0, "the samples have ended")
        victim.kill()
        answer = asked.result(SECONDS)
    assert answer.json()["strategy"]["scores"] == pytest.approx(scores, abs=1e-4)
    assert metric(server, "verifier_failures", "rm") == 0
    assert victim.pid not in [process.pid for process in reward_processes(server)]


def test_a_stopped_process_costs_its_request_the_limit(model_folder: Path, reward_folder: Path) -> None:
    served = served_with(ThreadedEngine(), model_folder, reward_folder, limit=5.0)
    try:
        strategy = {"kind": "best_of", "n": 3, "score": "rm"}
        (victim,) = reward_processes(served)
        victim.suspend()
        answer = ask(served, strategy=strategy)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "no_score"
        assert metric(served, "verifier_failures", "rm") == 3
        wait_until(lambda: ask(served, strategy=strategy).status_code == 200, "the model is started again")
        (another,) = reward_processes(served)
        assert another.pid != victim.pid
        another.suspend()
        served.process.kill()
        wait_until(lambda: not another.is_running(), "it ends with its server, although it is stopped")
    finally:
        log = served.stop()
    assert "rm: no score within verify.limit, 5.00 s: its process hangs or is too slow" in log
    assert "reward model rm: its process did not answer for 5.00 s; it is started again" in log


@pytest.mark.slow
def test_weights_that_cannot_be_loaded_end_the_start(model_folder: Path, reward_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(reward_folder, folder)
    os.truncate(folder / "model.safetensors", 1000)
    section = json.dumps({"verifiers": {"rm": {"model": str(folder)}}})
    command = [sys.executable, "-m", "craton.ml.serving.server", "--connection", "0", "--port", "0"]
    options = ["--model-folder", str(model_folder), "--strategies", section]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith(f"error: rm: {folder} cannot be loaded: ")
