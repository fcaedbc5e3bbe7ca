"""Scalar heads: scores are those of transformers' classes for sequence classification, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from craton.job import ModelError, parse_job
from craton.job.model import ModelShape
from craton.job.sections import Lora
from craton.ml.export_adapters import save_adapters
from craton.ml.models import (
    Decoder,
    DecoderConfig,
    config_from_huggingface,
    config_of_job,
    load_weights,
    save_folder,
)
from craton.ml.posttraining import RewardModel, RewardModelError

VOCABULARY = 64
SHAPES = {
    "llama": ModelShape("llama", 2, 32, 48, 4, 2, 8, VOCABULARY),
    "qwen3": ModelShape("qwen3", 2, 32, 48, 4, 2, 8, VOCABULARY, qk_norm=True, tied_embeddings=True),
}
TEXTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9]]


def scorer(shape: ModelShape) -> Decoder:
    model = Decoder(DecoderConfig(shape, heads="score", initializer_range=0.3))
    model.initialize(1)
    assert model.score is not None
    assert float(model.score.weight.detach().abs().max()) == 0, "a fresh scalar head is zero"
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("family", SHAPES)
def test_scores_of_an_exported_folder_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = scorer(SHAPES[family])
    folder = save_folder(model.state_dict(), model.config, tmp_path / family, dtype=torch.float32)
    names = model.state_dict()
    assert "score.weight" in names
    assert "head.weight" not in names
    ours = RewardModel(folder).score(TEXTS)
    theirs, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert type(theirs).__name__.endswith("ForSequenceClassification")
    assert theirs.config.num_labels == 1
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        wanted = [float(theirs(torch.tensor([text])).logits) for text in TEXTS]
    assert ours == pytest.approx(wanted, abs=1e-5)
    assert len(set(ours)) == len(TEXTS)
    theirs.save_pretrained(tmp_path / "again")
    assert RewardModel(tmp_path / "again").score(TEXTS) == ours


def test_a_language_model_starts_with_a_fresh_scalar_head(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    plain = Decoder(DecoderConfig(shape))
    plain.initialize(3)
    folder = save_folder(plain.state_dict(), plain.config, tmp_path / "plain", dtype=torch.float32)
    for heads in ("score", "both"):
        model = Decoder(replace(config_from_huggingface(folder), heads=heads))  # type: ignore[arg-type]
        unused = load_weights(model, folder)
        assert model.score is not None
        assert float(model.score.weight.detach().abs().max()) == 0
        assert torch.equal(model.embedding.weight, plain.embedding.weight)
        assert unused == (("lm_head.weight",) if heads == "score" else ())
    with pytest.raises(RewardModelError, match="without a scalar head"):
        RewardModel(folder)


def test_a_policy_with_values_is_published_without_them(tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(SHAPES["llama"], heads="both"))
    model.initialize(3)
    folder = save_folder(model.state_dict(), model.config, tmp_path / "policy", dtype=torch.float32)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert config_from_huggingface(folder).heads == "tokens"
    load_weights(Decoder(config_from_huggingface(folder)), folder)


def test_what_cannot_be_scored_is_said(tmp_path: Path) -> None:
    model = scorer(SHAPES["llama"])
    folder = save_folder(model.state_dict(), model.config, tmp_path / "scorer", dtype=torch.float32)
    for text in ([], [VOCABULARY]):
        with pytest.raises(RewardModelError, match="at least one token"):
            RewardModel(folder).score([[1], text])
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}}
    with pytest.raises(ModelError, match="3 labels"):
        config_from_huggingface(config)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("kind: dpo\npreference: {loss: reward}", "score"),
        ("kind: dpo", "tokens"),
        ("kind: grpo\npolicy: {loss: ppo}\nreward: [{verifier: math}]", "both"),
        ("kind: grpo\nreward: [{verifier: math}]", "tokens"),
    ],
)
def test_the_loss_of_a_job_decides_its_heads(text: str, heads: str) -> None:
    model = "model: {layers: 1, hidden: 16, ffn_hidden: 16, heads: 2, kv_heads: 2, vocab: 64}"
    batch = "" if "grpo" in text else ", global_batch_sequences: 4"
    job = parse_job(
        f"name: a\n{text}\n{model}\ndata: {{sequence: 32, path: data}}\ntrain: {{steps: 2{batch}}}\ncluster: local\n"
    )
    assert config_of_job(job).heads == heads


def test_adapters_of_a_reward_model_bring_its_head(tmp_path: Path) -> None:
    config = DecoderConfig(SHAPES["llama"], heads="score")
    state = {
        "blocks.0.attention.output.lora_a": torch.randn(2, 32),
        "blocks.0.attention.output.lora_b": torch.randn(32, 2),
        "score.weight": torch.randn(1, 32),
    }
    folder = save_adapters(state, config, Lora(rank=2), "base", tmp_path / "adapters", torch.float32)
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert (fields["task_type"], fields["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert fields["target_modules"] == ["o_proj"]
    saved = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.score.weight"], state["score.weight"])
