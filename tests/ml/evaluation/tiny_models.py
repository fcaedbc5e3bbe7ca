"""A tiny model folder with a tokenizer of bytes, and suites that it sometimes solves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from craton.job import dump_job, make_job
from craton.job.model import ModelShape
from craton.ml.data.tokenizing import train_tokenizer
from craton.ml.evaluation.rank import SuiteEvaluation
from craton.ml.models import Decoder, DecoderConfig, save_folder
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder

VOCABULARY = 259
SHAPE = ModelShape("tiny", 1, 32, 64, 4, 2, 8, VOCABULARY, tied_embeddings=True, max_sequence=256)


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a model with random weights, in the form of Hugging Face."""
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("What is 1 + 2? Answer: 3\n" * 20, encoding="utf-8")
    train_tokenizer([str(text)], VOCABULARY, folder / "tokenizer")
    model = Decoder(DecoderConfig(SHAPE))
    torch.manual_seed(seed)
    model.initialize(seed)
    return save_folder(model.state_dict(), model.config, folder / "model", folder / "tokenizer", torch.float32)


def write_reward_model(folder: Path, policy: Path) -> Path:
    """Write a reward model with random weights and the tokenizer of a policy."""
    model = Decoder(DecoderConfig(replace(SHAPE, tied_embeddings=False), heads="score", initializer_range=0.3))
    model.initialize(5)
    assert model.score is not None
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(6))
    return save_folder(model.state_dict(), model.config, folder, policy, torch.float32)


def write_suite(folder: Path, problems: int = 40, samples: int = 4, rest: str = "") -> Path:
    """Write a suite whose answers have a byte of a problem's own class: random text solves about half of them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {number}?", "answer": r"[\x00-\x50]$"} for number in range(problems)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / "bytes.yaml"
    path.write_text(
        'data: {path: problems.jsonl}\ntemplate: "{question}"\nreward: regex\nanswer: text\n'
        f"sampling: {{max_tokens: 6, samples: {samples}, temperature: 1.0}}\n{rest}",
        encoding="utf-8",
    )
    return path


def opened(run: Path, model: Path | None, suite: Path, **section: object) -> SuiteEvaluation:
    """Open an evaluation of a folder, or of `endpoint`."""
    if not run.exists():
        RunDirectory.create(run.parent, run.name)
    job = make_job(
        {
            "name": run.name,
            "kind": "eval",
            **({} if model is None else {"model": str(model)}),
            "eval": {"suite": str(suite), **section},
            "cluster": "local",
        }
    )
    directory = RunDirectory(run)
    directory.job_path.write_text(dump_job(job), encoding="utf-8")
    return SuiteEvaluation(job, directory, Recorder("node-0", 0, 0), LedgerClock(started=0.0))
