"""The dashboards on a training as a user has it: `craton run`, this machine's exporter, real Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from observability.dashboards.asking import EVERYTHING, answer
from observability.dashboards.watched_cluster import EVERY_SECONDS, Cluster, FixedExporters
from observability.exporter.exporting import exporting

from craton.agent.processes import free_port
from craton.observability.dashboards.boards import BOARDS
from craton.observability.exporter import ExporterServer
from craton.observability.prometheus import Observer, ObserverSettings
from craton.observability.prometheus.targets import ScrapeTarget

SECONDS = 180.0
JOB = """\
name: words
kind: pretrain
model: {name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 300, tied_embeddings: true}
data: {path: text.jsonl, validation: text.jsonl, tokenizer: "bpe:300", sequence: 32}
train:
  global_batch_sequences: 4
  steps: 1000000
  precision: fp32
  learning_rate: 1e-3
  evaluate: {every_steps: 20, sequences: 4}
checkpoint: {tiers: [{to: shared, every: 5s}]}
cluster: local x 2
"""
# A laptop has no price, and on a run that is well nothing alerts.
WITHOUT = ("cost_dollars", "ALERTS")


@pytest.mark.slow
def test_every_query_of_a_run_returns_data_on_a_real_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: `make observers` installs it where it may")
    (tmp_path / "words.yaml").write_text(JOB)
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(600)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    port = free_port()
    host = socket.gethostname()
    with ExitStack() as stack:
        run = _craton(tmp_path, "run", "words.yaml", "--json")
        stack.callback(run.wait, 60)
        stack.callback(lambda: _craton(tmp_path, "stop", "words", "--now").wait(60))
        exporter = stack.enter_context(exporting("/", node=host, leaf="leaf-1", mode="off"))
        server = ExporterServer(exporter, "127.0.0.1", 0)
        stack.callback(server.close)
        data = tmp_path / "metrics"
        observer = Observer(ObserverSettings(port=port, every_seconds=EVERY_SECONDS, alertmanager=False, data=data))
        target = ScrapeTarget("craton-node", f"127.0.0.1:{server.port}", {"node": host, "leaf": "leaf-1"})
        observer.keeper.exporters = FixedExporters(known=[target])
        stack.enter_context(observer)
        assert observer.prometheus is not None
        cluster = Cluster(observer.prometheus, [])
        asked = [
            (board.name, panel, query)
            for board in BOARDS
            for panel, query in board.queries
            if board.name != "serving" and not query.hardware_only and not any(words in query.expr for words in WITHOUT)
        ]
        chosen = {"run": "words", "node": EVERYTHING, "leaf": EVERYTHING}
        deadline = time.monotonic() + SECONDS
        while asked and time.monotonic() < deadline:
            assert run.poll() is None, "the training ended"
            observer.refresh()
            asked = [each for each in asked if not answer(cluster, each[1], each[2], chosen)]
            time.sleep(EVERY_SECONDS)
        assert not asked, "\n".join(f"{name}: {panel.title}: {query.expr}" for name, panel, query in asked)


def _craton(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "craton", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
