"""A data source that blocks one rank for ever: every view names the rank, its phase and the line of code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

SOURCE = """
import os
import threading

import numpy as np


def blocked(job, split):
    def sample(index):
        if os.environ["RANK"] == "1" and split == "train" and index >= FIRST:
            threading.Event().wait()
        tokens = np.random.default_rng(index).integers(0, 16, job.sequence + 1)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "weight": np.ones(job.sequence, np.float32)}

    return sample
"""
JOB = """
name: blocked
kind: pretrain
model: {name: tiny, layers: 1, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 16, tied_embeddings: true}
data: {source: "source:blocked", sequence: 32}
train: {global_batch_sequences: 4, steps: 5000, precision: fp32, learning_rate: 1e-3}
cluster: local x 2
layout: {micro_batch: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 10], ids=["in its first step", "after ten steps"])
def test_every_view_names_the_blocked_rank(tmp_path: Path, step: int) -> None:
    (tmp_path / "source.py").write_text(SOURCE.replace("FIRST", str(4 * step)))
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, "CRATON_RUNS": str(tmp_path / "runs")}

    def craton(*words: str) -> str:
        command = [sys.executable, "-m", "craton", *words]
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def movement() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(craton("ps", "--json"))[0]["movement"]
        return found

    craton("run", "job.yaml", "--detach")
    try:
        wait_until(lambda: (seen := movement())["state"] == "stuck" and seen["frame"], what=movement)
        seen = movement()
        assert (seen["ranks"], seen["kind"]) == ([1], "data")
        assert seen["frame"].startswith("source.py:11 in sample")
        assert "rank 1 in data" in craton("ps")
        verdict = json.loads(craton("why", "blocked", "--json"))
        assert (verdict["condition"], verdict["rank"], verdict["cause"]) == ("hung", 1, "user_code_blocked")
        assert any("source.py:11 in sample" in line for line in verdict["evidence"])
        top = json.loads(craton("top", "blocked", "--json"))
        assert (top["movement"]["ranks"], top["verdict"]["condition"]) == ([1], "hung")
        stack = (tmp_path / "runs" / "blocked" / "stacks" / "rank-00001.txt").read_text()
        assert "source.py" in stack
    finally:
        craton("stop", "blocked", "--now")
