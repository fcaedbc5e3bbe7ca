"""Random tiny models of every family as transformers makes and saves them: what our decoder must agree with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SEQUENCE = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def _configurations() -> dict[str, transformers.PreTrainedConfig]:
    with_experts = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "llama": transformers.LlamaConfig(**_SIZES),
        "llama3": transformers.LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3), tie_word_embeddings=True),
        "mistral": transformers.MistralConfig(**_SIZES, sliding_window=8),
        "qwen2": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen2-window": transformers.Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
        "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=16, rms_norm_eps=1e-5),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **_SIZES,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        ),
        "mixtral": transformers.MixtralConfig(**with_experts),
        "deepseek_v2": transformers.DeepseekV2Config(
            **{**_LATENT, "n_group": 1, "topk_group": 1}, q_lora_rank=None, rope_parameters=dict(_YARN)
        ),
        "deepseek_v2-groups": transformers.DeepseekV2Config(
            **_LATENT, q_lora_rank=12, topk_method="group_limited_greedy", routed_scaling_factor=16.0
        ),
        "deepseek_v3": transformers.DeepseekV3Config(**_LATENT, q_lora_rank=12, rope_parameters=dict(_YARN)),
        "deepseek_v3-direct": transformers.DeepseekV3Config(
            **_LATENT, q_lora_rank=None, rope_interleave=False, tie_word_embeddings=True
        ),
    }


FAMILIES = tuple(_configurations())


@cache
def published_model(family: str) -> transformers.PreTrainedModel:
    """Random weights wide enough that a mistake in any of them shows."""
    configuration = _configurations()[family]
    configuration.initializer_range = 0.2
    configuration._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(configuration).float().eval()
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            if name.endswith(("bias", "e_score_correction_bias")):
                tensor.uniform_(-0.3, 0.3)
    return model


def save_published(family: str, folder: Path, **options: Any) -> Path:
    published_model(family).save_pretrained(folder, **options)
    return folder


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, _SIZES["vocab_size"], (rows, SEQUENCE), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of_published(model: transformers.PreTrainedModel) -> Tensor:
    out: Tensor = model(tokens()).logits
    return out
