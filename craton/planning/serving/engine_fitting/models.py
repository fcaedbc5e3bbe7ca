"""Model shapes from the numbers of a Hugging Face configuration, as inference case files print them."""

from __future__ import annotations

from typing import Any

from craton.job.model import MlaShape, ModelShape
from craton.planning.calibration import UnrepresentableError, whole

LLAMA4_CHUNK = 8192  # attention chunk of three of four layers
SPARSE_TOKENS = 2048  # that DeepSeek sparse attention selects (GLM-5)
LINEAR_WINDOW = 256  # tokens of KV cache that cost as much as the state of a linear-attention layer


def shape_of_config(name: str, config: dict[str, Any]) -> ModelShape:
    """Return the shape of a model; UnrepresentableError names what the configuration lacks."""
    missing = [
        key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if not config.get(key)
    ]
    if missing:
        raise UnrepresentableError(f"architecture of {name} not stated: {', '.join(missing)}")

    def size(*keys: str) -> int:
        return next((whole(config[key], key) for key in keys if config.get(key)), 0)

    kind = str(config.get("model_type") or "")
    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    experts = size("n_routed_experts", "num_local_experts", "num_experts")
    expert_width = size("moe_intermediate_size", "intermediate_size") if experts else 0
    dense = size("first_k_dense_replace") if experts else 0
    if experts and size("interleave_moe_layer_step") > 1:
        dense = layers - layers // size("interleave_moe_layer_step")
    width = size("intermediate_size_mlp", "intermediate_size") or expert_width
    if not width:
        raise UnrepresentableError(f"architecture of {name} not stated: intermediate_size")
    mla = None
    if config.get("kv_lora_rank"):
        mla = MlaShape(
            q_lora=size("q_lora_rank"),
            kv_lora=size("kv_lora_rank"),
            qk_nope=size("qk_nope_head_dim"),
            qk_rope=size("qk_rope_head_dim"),
            v_head=size("v_head_dim"),
        )
    window, windowed, linear = size("sliding_window"), 0, 0
    if window:
        windowed = layers // 2 if kind == "gpt_oss" else layers
    elif kind == "llama4_text":
        window, windowed = LLAMA4_CHUNK, layers * 3 // 4
    elif kind == "glm_moe_dsa":
        window, windowed = SPARSE_TOKENS, layers
    elif kind.startswith("qwen3_5"):
        window = LINEAR_WINDOW
        windowed = linear = layers * 3 // 4
    if experts and not size("num_experts_per_tok"):
        raise UnrepresentableError(f"architecture of {name} not stated: num_experts_per_tok")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn_hidden=width,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or max(1, hidden // heads),
        vocab=size("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        mla=mla,
        experts=experts,
        top_k=size("num_experts_per_tok") if experts else 0,
        moe_ffn_hidden=expert_width,
        shared_experts=size("n_shared_experts") or int(kind == "llama4_text" or kind.startswith("qwen3_5")),
        dense_layers=min(dense, layers),
        mtp_layers=size("num_nextn_predict_layers"),
        sliding_window=window,
        sliding_layers=windowed,
        linear_layers=linear,
    )
