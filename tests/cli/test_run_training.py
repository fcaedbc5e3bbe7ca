"""The whole way with a real model: run, stop in the middle, resume on another number of ranks, export, sample."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from run_verbs import Verbs

JOB = """\
name: words
kind: pretrain
model: {name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 300, tied_embeddings: true}
data: {path: text.jsonl, validation: text.jsonl, tokenizer: "bpe:300", sequence: 32}
train:
  global_batch_sequences: 4
  steps: 24
  precision: fp32
  learning_rate: 1e-2
  evaluate: {every_steps: 12, sequences: 4}
cluster: local x 2
"""


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics" / "node-0.jsonl").read_text().splitlines()]
    return {line["step"]: line["run_loss"] for line in lines if "run_loss" in line}


@pytest.mark.slow
def test_from_a_job_file_to_a_sample(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(600)]
    (verbs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = verbs.folder / "words.yaml"
    job.write_text(JOB)

    stopped = verbs.json("run", job, "--stop-at", "50%")
    assert (stopped["state"], stopped["step"], stopped["checkpoint_step"]) == ("stopped", 12, 12)
    assert stopped["plan"]["step_seconds"] > 0
    compared = {row["name"]: row for row in stopped["comparison"]}
    assert compared["step_seconds"]["measured"] > 0
    assert compared["memory_bytes"]["ratio"] > 0

    behind = verbs("resume", "words", "--stop-at", "50%")
    assert behind.returncode == 2
    assert "--stop-at 12 is not after the newest checkpoint of words, step 12" in behind.stderr

    resumed = verbs("resume", "words", "--cluster", "local x 1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for words in (
        "12 of 24 steps",
        "step 12 in shared",
        "1 rank on 1 node",
        "Predicted against measured",
        "words is done",
    ):
        assert words in resumed.stdout
    loss = losses(verbs.root / "words")
    assert sorted(loss) == list(range(1, 25))
    assert loss[13] < loss[1] - 0.5  # it went on, it did not begin again
    assert loss[24] < loss[13]
    assert "is already at step 24 of 24" in verbs("resume", "words").stderr

    exported = verbs("export", "words", verbs.folder / "model")
    assert exported.returncode == 0, exported.stderr
    assert "step 24 of words" in exported.stdout
    assert (verbs.folder / "model" / "model.safetensors").is_file()
    usual = (verbs.folder / "model" / "config.json").stat().st_mode
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (verbs.folder / "model").iterdir()}
    assert set(modes.values()) == {stat.filemode(usual)}, modes
    sampled = verbs.json("sample", verbs.folder / "model", "--prompt", "a cat", "--max-tokens", "4")
    assert sampled["samples"][0]["tokens"] == 4
