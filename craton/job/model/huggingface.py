"""Model shapes from Hugging Face `config.json` files: in a folder, or in the Hub's local cache. Never the network.

Only known model families are supported. A field that changes the shape and is missing or cannot be represented is an
error; nothing is guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from craton.job.errors import ModelError
from craton.job.model.quantization import served_int4_format
from craton.job.model.shape import MlaShape, ModelShape
from craton.nearest import did_you_mean

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_MOE = ("mixtral", "qwen3_moe", "gpt_oss")
_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = (*_LLAMA_LIKE, *_MOE, *_MLA, "gpt2", "gpt_neox")
SCORED = "ForSequenceClassification"  # ends the architecture of a reward model


def model_from_config(config: Mapping[str, Any], name: str = "", source: str = "config.json") -> ModelShape:
    """Return the shape described by a Hugging Face config."""
    reader = _Reader(config, source)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        near = did_you_mean(str(family), FAMILIES)
        raise ModelError(
            f"{source}: model_type {family!r} is not known; allowed: {', '.join(FAMILIES)}{near}; "
            "or write the shape of the model inline under `model:`"
        )
    name = name or str(config.get("_name_or_path") or family)
    if family == "gpt2":
        shape = _gpt2(reader, name, source)
    elif family in _MLA:
        shape = _deepseek(reader, name, source)
    else:
        shape = _decoder(reader, family, name, source)
    return replace(shape, int4=served_int4_format(config))


def read_config(path: Path, name: str = "") -> ModelShape:
    """Return the shape in a folder with a config.json, or in the file itself."""
    config, file = load_config(path)
    return model_from_config(config, name or file.resolve().parent.name, str(file))


def load_config(path: Path) -> tuple[dict[str, Any], Path]:
    """Return the content of the config.json of a folder, or of the file itself, and the path of that file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: has no config.json; give a folder or file of a Hugging Face model") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must be a JSON object, the config.json of a Hugging Face model")
    return config, file


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face config is that of a model with scores instead of tokens."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith(SCORED) for name in architectures)


def cached_config(hub_id: str) -> Path:
    """Return the path of the config.json of `organisation/name` in the local Hub cache."""
    cache = hub_cache()
    snapshots = cache / ("models--" + hub_id.replace("/", "--")) / "snapshots"
    configs = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if not configs:
        raise ModelError(
            f"{hub_id!r} is not in the Hugging Face cache {cache}; fetch it once with "
            f"`hf download {hub_id} config.json` (HF_TOKEN for gated models), or give a preset or an inline shape"
        )
    return configs[-1]


def hub_cache() -> Path:
    """Return the Hub cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub, like huggingface_hub."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


class _Reader:
    """The fields of one config; a missing or invalid field is an error that names it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {key!r} is missing; the shape of the model is unknown without it")
        at_least = 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ModelError(f"{self.source}: {key!r} is {value!r}; it must be a whole number from {at_least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def refuse(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self.source}: {key} {self.config.get(key)!r} cannot be represented: {reason}")


def _decoder(reader: _Reader, family: str, name: str, source: str) -> ModelShape:
    """Return the shape of Llama-like models, dense or with experts in every layer."""
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    layers = reader.size("num_hidden_layers")
    # The field is required where the default of the model class is not the obvious one.
    head_dim = reader.size("head_dim", None if family in ("qwen3", "qwen3_moe", "gpt_oss") else hidden // heads)
    kv_heads = reader.size("num_key_value_heads", heads if family in ("llama", "gpt_neox") else None)
    window, sliding_layers = _sliding_window(reader, family, layers)
    experts = dense_layers = moe_ffn_hidden = 0
    if family in _MOE:
        # Qwen3-MoE has num_experts before transformers 5, which uses the same name as the other families
        experts = reader.size("num_experts" if "num_experts" in reader.config else "num_local_experts")
        moe_ffn_hidden = reader.size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size")
        dense_layers = _leading_dense_layers(reader, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn_hidden=reader.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        gated_mlp=family != "gpt_neox",
        experts=experts,
        top_k=reader.size("num_experts_per_tok") if experts else 0,
        moe_ffn_hidden=moe_ffn_hidden,
        dense_layers=dense_layers,
        sliding_window=window,
        sliding_layers=sliding_layers,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_sequence=reader.size("max_position_embeddings", 0),
        source=source,
    )


def _deepseek(reader: _Reader, name: str, source: str) -> ModelShape:
    """Return the shape of DeepSeek-V2, DeepSeek-V3 and Kimi-K2."""
    if reader.size("moe_layer_freq", 1) != 1:
        raise reader.refuse("moe_layer_freq", "only experts in every layer after the dense ones are supported")
    heads = reader.size("num_attention_heads")
    mla = MlaShape(
        q_lora=reader.size("q_lora_rank", 0),
        kv_lora=reader.size("kv_lora_rank"),
        qk_nope=reader.size("qk_nope_head_dim"),
        qk_rope=reader.size("qk_rope_head_dim"),
        v_head=reader.size("v_head_dim"),
    )
    return ModelShape(
        name=name,
        layers=reader.size("num_hidden_layers"),
        hidden=reader.size("hidden_size"),
        ffn_hidden=reader.size("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=mla.qk_nope + mla.qk_rope,
        vocab=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        mla=mla,
        experts=reader.size("n_routed_experts"),
        top_k=reader.size("num_experts_per_tok"),
        moe_ffn_hidden=reader.size("moe_intermediate_size"),
        shared_experts=reader.size("n_shared_experts", 0),
        dense_layers=reader.size("first_k_dense_replace", 0),
        mtp_layers=reader.size("num_nextn_predict_layers", 0),
        max_sequence=reader.size("max_position_embeddings", 0),
        source=source,
    )


def _gpt2(reader: _Reader, name: str, source: str) -> ModelShape:
    hidden = reader.size("n_embd")
    heads = reader.size("n_head")
    return ModelShape(
        name=name,
        layers=reader.size("n_layer"),
        hidden=hidden,
        ffn_hidden=reader.size("n_inner", 4 * hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", True),
        gated_mlp=False,
        max_sequence=reader.size("n_positions", 0),
        source=source,
    )


def _sliding_window(reader: _Reader, family: str, layers: int) -> tuple[int, int]:
    """Return (window, layers that use it). Qwen ships a disabled window; gpt-oss without layer types alternates."""
    window = reader.size("sliding_window", 0)
    if not window or (family.startswith("qwen") and not reader.flag("use_sliding_window", False)):
        return 0, 0
    layer_types = reader.config.get("layer_types")
    if isinstance(layer_types, list):
        return window, layer_types.count("sliding_attention")
    if family == "gpt_oss":
        return window, (layers + 1) // 2
    if family.startswith("qwen"):
        return window, layers - reader.size("max_window_layers")
    return window, layers


def _leading_dense_layers(reader: _Reader, layers: int) -> int:
    """Return the number of leading layers without experts; Qwen allows others, which the shape cannot represent."""
    if reader.size("decoder_sparse_step", 1) != 1:
        raise reader.refuse("decoder_sparse_step", "only experts in every layer are supported")
    dense = reader.config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))) or len(dense) > layers:
        raise reader.refuse("mlp_only_layers", "layers without experts must be the first ones")
    return len(dense)
