"""Training of ranks that share a real GPU, with NCCL over loopback: every kind of layout learns."""

from __future__ import annotations

import json

import pytest
import torch
from run_verbs import Verbs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

JOB = """\
name: parts
kind: pretrain
model: {layers: 4, hidden: 256, ffn_hidden: 512, heads: 4, vocab: 300}
data: {path: text.jsonl, tokenizer: "bpe:300", sequence: 64}
train: {global_batch_sequences: 16, steps: 12, learning_rate: 3e-3}
cluster: local x 4
"""


@pytest.mark.parametrize(
    "layout",
    ["{fsdp: 4}", "{fsdp: 2, tp: 2}", "{fsdp: 2, cp: 2}", "{pp: 2, fsdp: 2}"],
)
def test_a_layout_of_four_ranks_learns_on_one_gpu(layout: str, verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    texts = [f"cat {number} sat on the mat and dog {number} ran to the man" for number in range(2000)]
    (verbs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = verbs.folder / "parts.yaml"
    job.write_text(f"{JOB}layout: {layout}\nrun: {{env: {{NCCL_DEBUG: INFO}}}}\n")
    ended = verbs.json("run", job, "--share-gpus")
    assert (ended["state"], ended["step"]) == ("done", 12)
    run = verbs.root / "parts"
    lines = [json.loads(line) for line in (run / "metrics" / "node-0.jsonl").read_text().splitlines()]
    losses = [line["run_loss"] for line in lines if "run_loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert "NET/Socket" in (run / "logs" / "rank-00000.log").read_text()
