"""A real server on this machine: a small model with a tokenizer in a folder, and the run that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import requests
from model_pairs import their_model
from transformers import PreTrainedModel
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.job import parse_job
from craton.ml.data import load_tokenizer
from craton.ml.data.chat import ensure_template
from craton.ml.data.tokenizer import train_bpe
from craton.orchestration import living_agents
from craton.orchestration.draft import draft_run
from craton.orchestration.start import kill_run, start_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

SECONDS = 90.0
LONGEST = 256


def make_model(folder: Path, seed: int, family: str = "llama") -> PreTrainedModel:
    train_bpe(["The quick brown fox says hello to the world. What is 2 + 2? It is 4.\n"] * 4, 300, folder)
    ensure_template(folder)
    vocabulary = load_tokenizer(folder).get_vocab_size()
    model = their_model(family, seed, vocab_size=vocabulary)
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
            return requests.get(f"{self.url}/health", timeout=PATIENCE_SECONDS).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    def admin(self, path: str, **body: Any) -> Any:
        key = self.run.admin_key_path.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {key}"}
        response = requests.post(f"{self.url}{path}", json=body, timeout=SECONDS, headers=headers)
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
def serving(folder: Path, root: Path, name: str, tp: int = 1, more: str = "", ep: int = 1) -> Iterator[Server]:
    port = free_port()
    job = parse_job(
        f"name: {name}\nkind: serve\nmodel: {folder}\ncluster: local\nlayout: {{tp: {tp}, ep: {ep}}}\n"
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
