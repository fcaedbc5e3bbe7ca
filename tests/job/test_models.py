"""Published shapes come to the parameter counts people quote, by preset and by config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from craton.job import ModelError, parse_job
from craton.job.model import MlaShape, ModelShape, model_from_config, model_preset, model_presets
from craton.job.model.presets import published_parameters

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN3_30B_OF_TRANSFORMERS_5 = {
    "num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_30B.items()
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "vocab_size": 201088,
}
MIXTRAL = {
    **LLAMA_8B,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
MISTRAL = {
    **LLAMA_8B,
    "model_type": "mistral",
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize("name", model_presets())
def test_presets_come_to_the_quoted_parameter_count(name: str) -> None:
    # GPT-3's table is rounded, and its position tables and biases are not part of the shape.
    allowed = 0.025 if name.startswith("gpt3") else 0.02
    shape = model_preset(name)
    assert shape.parameters == pytest.approx(published_parameters()[name], rel=allowed)
    assert shape.source


@pytest.mark.parametrize(
    ("name", "active_billions"),  # as the publishers say: 3.3B, 22B, 37B, 32B, 12.9B, 39B
    [
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("deepseek-v3", 37),
        ("kimi-k2", 32),
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
    ],
)
def test_experts_that_see_a_token(name: str, active_billions: float) -> None:
    assert model_preset(name).active_parameters / 1e9 == pytest.approx(active_billions, rel=0.03)


def test_aliases_and_case() -> None:
    assert model_preset("Llama-3-8B") == model_preset("llama-3.1-8b")
    assert model_preset("gpt-3-175b").layers == 96


def test_a_misspelt_preset_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'lama-3.1-8b' is not a model preset; .*did you mean 'llama-3.1-8b'\?"):
        model_preset("lama-3.1-8b")


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA_8B, "llama-3.1-8b"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (QWEN3_30B_OF_TRANSFORMERS_5, "qwen3-30b-a3b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        ({**DEEPSEEK_V3, "model_type": "kimi_k2"}, "deepseek-v3"),
        (GPT_OSS_20B, "gpt-oss-20b"),
        (MIXTRAL, "mixtral-8x7b"),
        (MISTRAL, "mistral-7b"),
    ],
)
def test_a_config_gives_the_shape_of_its_preset(config: dict[str, object], preset: str) -> None:
    expected = model_preset(preset)
    read = model_from_config(config, name=preset, source=expected.source)
    assert read == expected


def test_gpt2_and_neox() -> None:
    gpt2 = model_from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    )
    assert (gpt2.ffn_hidden, gpt2.gated_mlp, gpt2.tied_embeddings) == (3072, False, True)
    assert gpt2.parameters == pytest.approx(124.4e6, rel=0.02)
    pythia = {"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32}
    pythia |= {"num_hidden_layers": 32, "vocab_size": 50432, "max_position_embeddings": 2048}
    assert model_from_config(pythia).parameters == pytest.approx(6.857e9, rel=0.02)  # Pythia 6.9B


def test_windows_of_qwen_are_off_unless_switched_on() -> None:
    qwen2 = {**LLAMA_8B, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    assert model_from_config(qwen2).sliding_window == 0
    switched_on = model_from_config({**qwen2, "use_sliding_window": True})
    assert (switched_on.sliding_window, switched_on.sliding_layers) == (4096, 4)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not known; allowed: llama, .*did you mean 'llama'"),
        ({}, "model_type None is not known"),
        ({**LLAMA_8B, "hidden_size": None}, "'hidden_size' is missing"),
        ({**LLAMA_8B, "num_attention_heads": "many"}, "'num_attention_heads' is 'many'; it must be a whole number"),
        ({**LLAMA_8B, "num_attention_heads": 0}, "'num_attention_heads' is 0; it must be a whole number from 1"),
        ({**QWEN3_30B, "mlp_only_layers": [3]}, "mlp_only_layers .* cannot be represented"),
        ({**QWEN3_30B, "decoder_sparse_step": 2}, "decoder_sparse_step 2 cannot be represented"),
        ({**QWEN3_30B, "head_dim": None}, "'head_dim' is missing"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, "moe_layer_freq 2 cannot be represented"),
    ],
)
def test_a_config_that_cannot_be_understood_says_which_field(config: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        model_from_config(config)


JOB = "kind: pretrain\nmodel: {model}\ndata: {{sequence: 128}}\ntrain: {{global_batch_sequences: 8}}\ncluster: local\n"


def shape_of(model: str, folder: Path) -> ModelShape | None:
    return parse_job(JOB.format(model=model), folder=folder).model_shape


def test_a_folder_a_file_and_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    assert shape_of("./my-model", tmp_path) == shape_of("my-model/config.json", tmp_path)

    snapshot = tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_30B))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    shape = shape_of("org/name", tmp_path)
    assert shape is not None
    assert (shape.name, shape.experts) == ("org/name", 128)

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"job.yaml:2: model: 'org/name' is not in .*elsewhere; fetch it once with"):
        shape_of("org/name", tmp_path)


def test_inline_numbers_have_the_usual_defaults(tmp_path: Path) -> None:
    shape = shape_of("{layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 1000}", tmp_path)
    assert shape is not None
    assert (shape.kv_heads, shape.head_dim, shape.name) == (4, 16, "inline")
    mla = "{q_lora: 0, kv_lora: 16, qk_nope: 8, qk_rope: 8, v_head: 8}"
    moe = f"layers: 2, hidden: 64, heads: 4, vocab: 9, experts: 4, top_k: 2, moe_ffn_hidden: 32, mla: {mla}"
    shape = shape_of("{" + moe + "}", tmp_path)
    assert shape is not None
    assert shape.mla == MlaShape(0, 16, 8, 8, 8)
    assert (shape.head_dim, shape.ffn_hidden) == (16, 32)


def test_a_function_has_no_shape(tmp_path: Path) -> None:
    assert shape_of("my_package.models:tiny", tmp_path) is None


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lama-3.1-8b", "job.yaml:2: model: 'lama-3.1-8b' is not a model preset, .*did you mean 'llama-3.1-8b'"),
        ("./nowhere", "job.yaml:2: model: .*nowhere: has no config.json"),
        ("{layers: 2, hiden: 64}", "job.yaml:2: key 'hiden' is not known under model; .*did you mean 'hidden'"),
        (
            "{layers: 2, hidden: 64, heads: 5, vocab: 9, ffn_hidden: 8}",
            "heads 5 does not divide hidden 64; give head_dim",
        ),
        ("{layers: 2, hidden: 64, heads: 4, vocab: 9}", "ffn_hidden is missing"),
        ("{layers: 2, hidden: 64, heads: 4, vocab: 9, ffn_hidden: 8, experts: 4}", "experts requires moe_ffn_hidden"),
        ("[1, 2]", r"\[1, 2\] is not a model"),
    ],
)
def test_a_model_that_cannot_be_used_says_why(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of(model, tmp_path)
