"""Which models can be built: presets, folders and Hub ids; the others are refused with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import save_published

from craton.job import ModelError, parse_job
from craton.job.model import ModelShape, model_preset, model_presets
from craton.ml.models import Decoder, DecoderConfig, config_from_huggingface, config_from_shape, model_folder
from craton.ml.models.config import RoutingConfig
from craton.ml.models.huggingface import config_to_huggingface, huggingface_family

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", [name for name in model_presets() if not name.startswith("gpt")])
def test_presets_build_with_the_parameters_the_planner_counts(name: str) -> None:
    shape = model_preset(name)
    config = config_from_shape(shape)
    few = replace(config, shape=replace(shape, layers=shape.dense_layers + 1))
    with torch.device("meta"):
        model = Decoder(few)
    counted = sum(
        p.numel() for key, p in model.named_parameters() if not key.endswith(("q_norm.weight", "k_norm.weight"))
    )
    if shape.mla:
        counted -= few.shape.layers * (shape.mla.q_lora + shape.mla.kv_lora)
    assert counted == few.shape.parameters
    assert config_from_huggingface(config_to_huggingface(config)).rope == config.rope


def test_presets_have_their_published_numbers() -> None:
    llama = config_from_shape(model_preset("llama-3.2-1b"))
    assert (llama.rope.theta, llama.rope.scaling, llama.rope.factor) == (500_000.0, "llama3", 32.0)
    assert config_from_shape(model_preset("qwen3-8b")).rope.theta == 1_000_000.0
    deepseek = config_from_shape(model_preset("deepseek-v3"))
    assert (deepseek.routing.groups, deepseek.routing.routed_scale, deepseek.routing.bias_update) == (8, 2.5, 0.001)
    assert huggingface_family(deepseek) == "deepseek_v3"


def test_a_job_whose_model_is_a_folder_gets_that_folder_s_numbers(tmp_path: Path) -> None:

    folder = save_published("qwen3", tmp_path / "qwen")
    job = parse_job(
        f"name: a\nkind: pretrain\nmodel: {folder}\ncluster: local x 1\n"
        "train: {steps: 1, global_batch_sequences: 1}\n"
    )
    assert job.model_shape is not None
    assert config_from_shape(job.model_shape) == config_from_huggingface(folder)


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt-oss-20b"])
def test_presets_that_can_only_be_planned_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"model '{name}' can be planned but not built: .*package.module:function"):
        config_from_shape(model_preset(name))


def test_a_model_that_is_not_causal_is_refused() -> None:
    shape = ModelShape("bidirectional", 1, 32, 64, 2, 2, 16, 64, causal=False)
    with pytest.raises(ModelError, match="its attention is not causal"):
        config_from_shape(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be built by Craton's decoder; allowed: llama, mistral"),
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' cannot be built"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' cannot be built"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; allowed: 'silu'"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layers with a sliding window must come last"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_configurations_the_decoder_cannot_follow_are_refused(change: dict[str, Any], message: str) -> None:
    assert config_from_huggingface(_LLAMA).shape.hidden == 64
    with pytest.raises(ModelError, match=message):
        config_from_huggingface({**_LLAMA, **change})


def test_a_decoder_that_transformers_has_not_is_not_exported() -> None:
    shape = replace(config_from_huggingface(_LLAMA).shape, experts=4, top_k=2, moe_ffn_hidden=32, shared_experts=1)
    with pytest.raises(ModelError, match="mixtral is nearest, but it does not support shared experts, sigmoid"):
        config_to_huggingface(DecoderConfig(shape, routing=RoutingConfig(scoring="sigmoid")))


def test_a_hub_id_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    # the client reads HF_HOME and HF_HUB_OFFLINE when it is first imported
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'lab/tiny' is not complete in the local Hub cache .*hf download lab/tiny"):
        model_folder("lab/tiny")
    repository = tmp_path / "models--lab--tiny"
    commit = "0" * 40
    snapshot = save_published("llama", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert model_folder("lab/tiny") == snapshot
    assert config_from_huggingface(model_folder("lab/tiny")).shape.vocab == 131
    with pytest.raises(ModelError, match="is not a folder or a Hub id"):
        model_folder("./nowhere")
