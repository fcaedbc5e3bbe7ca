"""Which program the ranks of a job run, by its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from craton.job import parse_job
from craton.orchestration.draft import fork_server_command
from craton.orchestration.draft.draft import rank_command

MODEL = "model: {layers: 1, hidden: 32, ffn_hidden: 64, heads: 2, kv_heads: 1, vocab: 300}"
TRAIN = "train: {global_batch_sequences: 4, steps: 1}"


@pytest.mark.parametrize(
    ("kind", "evaluate", "module", "options"),
    [
        ("pretrain", "", "craton.ml.training", []),
        ("dpo", "", "craton.ml.posttraining", ["--posttraining"]),
        ("sft", ", evaluate: {every_steps: 1, suite: json}", "craton.ml.posttraining", ["--posttraining"]),
    ],
)
def test_what_generates_has_a_program_of_its_own(kind: str, evaluate: str, module: str, options: list[str]) -> None:
    train = TRAIN.replace("}", f"{evaluate}}}", 1)
    job = parse_job(f"name: t\nkind: {kind}\n{MODEL}\n{train}\ndata: {{path: ., sequence: 32}}\ncluster: local")
    assert rank_command(job, Path("RUN"), "python") == ["python", "-m", module, "RUN"]
    assert fork_server_command(job, Path("RUN"), "python")[1:] == ["-m", "craton.ml.fork_server", "RUN", *options]
