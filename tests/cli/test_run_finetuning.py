"""Fine-tuning a published model: chats in, adapters trained on two ranks, a folder out that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_verbs import Verbs

from craton.api import run
from craton.job import load_job
from craton.ml.data.tokenizer import train_bpe
from craton.orchestration.watching import wait_for_agents
from craton.telemetry import RunDirectory, summarize

CHATS = [("what is red", "red is a colour"), ("say ten", "ten"), ("who is up", "nobody at all"), ("go on", "yes yes")]
JOB = """\
kind: sft
model: ./base
data: {path: chat.jsonl, sequence: 64, pack: false}
train: {global_batch_sequences: 4, steps: 12, precision: fp32, learning_rate: 2e-2, lora: {rank: 4, targets: all}}
cluster: local x 2
layout: {fsdp: 2}
"""


@pytest.fixture
def base(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random Llama of transformers in ./base, with a tokenizer; chats and a job file beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("CRATON_CACHE", str(verbs.folder / "cache"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    model.save_pretrained(verbs.folder / "base")
    train_bpe([" ".join(chat) for chat in CHATS], 300, verbs.folder / "base")
    (verbs.folder / "base" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    lines = [{"messages": [message("user", asked), message("assistant", said)]} for asked, said in CHATS]
    (verbs.folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (verbs.folder / "tune.yaml").write_text(JOB)
    return model.eval()


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def losses(started: RunDirectory) -> list[float]:
    lines = started.metrics_path("node-0").read_text().splitlines()
    return [json.loads(line)["run_loss"] for line in lines if "run_loss" in line]


def loss_on_answers(model: Any, folder: Path) -> float:
    """What transformers gives for the assistant's words and the token that ends them, and for nothing else."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    total, count = 0.0, 0
    for asked, said in CHATS:
        prompt = tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n").ids
        answer = tokenizer.encode(f"{said}<|im_end|>").ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    return total / count


@pytest.mark.slow
def test_adapters_learn_the_answers_and_leave_as_a_whole_model(verbs: Verbs, base: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    started = run(load_job("tune.yaml"), "tuned").directory
    wait_for_agents(started, 120)
    assert summarize(started).state == "done"
    seen = losses(started)
    assert seen[0] == pytest.approx(loss_on_answers(base, verbs.folder / "base"), rel=1e-4)
    assert seen[-1] < seen[0] - 1

    exported = verbs("export", "tuned", "out", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stderr
    tuned = AutoModelForCausalLM.from_pretrained(verbs.folder / "out", dtype=torch.float32).eval()
    assert loss_on_answers(tuned, verbs.folder / "out") < seen[-1] + 0.1
    assert tuned.generation_config.eos_token_id == [0, 2]
    sampled = verbs.json("sample", "out", "--prompt", "say", "--max-tokens", "3")
    assert sampled["samples"][0]["tokens"] <= 3
    answered = verbs.json("sample", "out", "--chat", "--prompt", "say", "--max-tokens", "3", "--temperature", "0")
    assert answered["samples"][0]["prompt"] == "say"
    assert answered["samples"][0]["tokens"] <= 3


def test_a_model_without_weights_is_refused_before_anything_starts(verbs: Verbs, base: Any) -> None:
    (verbs.folder / "base" / "model.safetensors").unlink()
    refused = verbs("run", "tune.yaml")
    assert refused.returncode == 2
    assert "tune.yaml:2: kind sft starts from a trained model, but base has no weights here" in refused.stderr
    assert not (verbs.root / "tune").exists()
    assert not (verbs.folder / "cache").exists(), "nothing was tokenized for it"
