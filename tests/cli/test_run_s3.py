"""Everything in S3, as a user has it: tokens, a run that reads them and keeps its checkpoints there, and its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_verbs import Verbs
from s3 import S3Server

JOB = """\
name: words
kind: pretrain
model: {name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 300, tied_embeddings: true}
data: {path: "BUCKET/tokens", validation: "BUCKET/tokens", sequence: 32}
train:
  global_batch_sequences: 4
  steps: 6
  precision: fp32
  evaluate: {every_steps: 6, sequences: 4}
checkpoint: {tiers: [{to: "BUCKET/checkpoints"}]}
cluster: local x 2
"""
PLANNED = """\
model: MODEL
kind: pretrain
data: {sequence: 32}
train: {tokens: 1M, global_batch_sequences: 8}
cluster: p5.48xlarge
"""


def cached(folder: Path) -> set[str]:
    """The endings of what was fetched."""
    files = [path for path in (folder / "cache" / "objects").rglob("*") if path.is_file()]
    return {path.suffix for path in files if ".state" not in path.parts}


@pytest.mark.slow
def test_tokens_checkpoints_and_models_in_s3(
    verbs: Verbs, bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    name = bucket.removeprefix("s3://")
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(400)]
    (verbs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--train-bpe", 300, "--validation", 0.1, "--workers", 1]
    tokenized = verbs.json("data", "tokenize", "text.jsonl", "--to", f"{bucket}/tokens", *options)
    assert tokenized["folder"] == f"{bucket}/tokens"
    assert {"tokens/index.json", "tokens/validation/index.json"} <= set(s3_server.objects(name))
    again = verbs("data", "tokenize", "text.jsonl", "--to", f"{bucket}/tokens", *options)
    assert again.returncode == 2
    assert f"{bucket}/tokens: already exists" in again.stderr

    job = verbs.folder / "words.yaml"
    job.write_text(JOB.replace("BUCKET", bucket))
    assert verbs.json("validate", job)["model"] == "tiny"
    assert not (verbs.folder / "cache" / "objects").exists()
    done = verbs.json("run", job)
    assert (done["state"], done["step"], done["checkpoint_step"]) == ("done", 6, 6)
    assert f"path: {bucket}/tokens" in (verbs.root / "words" / "job.yaml").read_text()
    assert {".tokens", ".documents"} <= cached(verbs.folder)

    exported = verbs.json("export", "words", verbs.folder / "model")
    assert exported["copy"] == f"{bucket}/checkpoints/words/exports/model"
    weights = (verbs.folder / "model" / "model.safetensors").read_bytes()
    assert s3_server.read(name, "checkpoints/words/exports/model/model.safetensors") == weights

    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "new"))
    job.write_text(PLANNED.replace("MODEL", exported["copy"]))
    assert verbs.json("validate", job)["model"] == "model"
    assert verbs.json("plan", job)["model"]
    found = [path.name for path in (verbs.folder / "new").rglob("*.*") if ".state" not in path.parts and path.is_file()]
    assert found == ["config.json"], "a plan needs no weights"
    sampled = verbs.json("sample", exported["copy"], "--prompt", "a cat", "--max-tokens", "2")
    assert sampled["samples"][0]["tokens"] == 2


def test_what_is_not_there_is_told_before_anything_starts(
    verbs: Verbs, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = verbs.folder / "words.yaml"
    job.write_text(PLANNED.replace("MODEL", f"{bucket}/nothing"))
    result = verbs("validate", job)
    assert result.returncode == 2
    assert f"words.yaml:1: model: {bucket}/nothing: nothing found; correct the path" in result.stderr
    job.write_text(JOB.replace("BUCKET", "s3://no-such-bucket"))
    result = verbs("run", job)
    assert result.returncode == 2
    assert "there is no bucket no-such-bucket; create it" in result.stderr
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    assert verbs("validate", job).returncode == 0, "a job is checked without a network"
    result = verbs("run", job)
    assert result.returncode == 2
    assert "words.yaml:10: checkpoint tier s3://no-such-bucket/checkpoints: " in result.stderr
    assert "S3 cannot be reached (2 attempts); check AWS_ENDPOINT_URL" in result.stderr
    assert not verbs.run("words").path.exists()
