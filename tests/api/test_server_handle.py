"""`craton.serve` and its handle: a real engine once; where it cannot answer, a program that ends or sleeps instead."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

import craton
from craton.orchestration import NoAnswerError, living_agents
from craton.orchestration.draft import draft
from craton.telemetry import list_runs

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the config of a tiny model; its weights are random."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(folder)


def replace_engine(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(draft, "rank_command", lambda job, run, python: [sys.executable, "-c", code])


@pytest.mark.slow
def test_a_server_answers_until_its_block_ends(root: Path, model: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
    with craton.serve(model, seconds=PATIENCE_SECONDS, initialize="random", precision="fp32", max_length=64) as server:
        assert (server.run.name, server.run.state) == ("serve-tiny", "running")
        assert repr(server) == f"Server({server.url!r}, serve-tiny, running)"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 4
    assert server.run.state == "stopped"
    assert living_agents(server.run.directory) == []


def test_a_block_that_raises_stops_its_server(root: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Path(__file__).parents[1] / "orchestration" / "answering.py"
    monkeypatch.setattr(draft, "rank_command", lambda job, run, python: [python, str(stand_in), str(run)])
    with pytest.raises(ZeroDivisionError), craton.serve(model, "mine", initialize="random") as server:
        raise ZeroDivisionError
    assert server.run.name == "mine"
    assert server.run.state == "stopped"


def test_a_server_that_takes_too_long_is_stopped(root: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_engine(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(TimeoutError, match=r"serve-tiny is not ready after 500 ms; it was stopped"):
        craton.serve(model, seconds=0.5, initialize="random")
    (directory,) = list_runs(root)
    assert craton.Run(directory).state == "stopped"
    assert living_agents(directory) == []


def test_a_server_that_fails_before_it_answers_is_an_error(
    root: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_engine(monkeypatch, "import sys; print('no room for the KV cache'); sys.exit(3)")
    with pytest.raises(
        NoAnswerError, match=r"serve-tiny ended \(failed\) before it was ready: .*no room for the KV cache"
    ):
        craton.serve(model, initialize="random")
    (directory,) = list_runs(root)
    assert living_agents(directory) == []
