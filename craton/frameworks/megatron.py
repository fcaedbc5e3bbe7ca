"""Megatron-LM's arguments, including the model's RoPE settings, and NeMo's parallelism, from a model and a layout.

Megatron derives the data-parallel size from the world size. Its distributed optimizer shards the optimizer state, which
is `zero: 1`. A model written inline has the default RoPE base, as when Craton trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton.frameworks.decoder import biases, config_of, norm_epsilon, preset_numbers
from craton.frameworks.errors import FrameworkError
from craton.job.layout import Layout
from craton.job.model import ModelShape

PRECISIONS = {"fp32": [], "fp16": ["--fp16"], "bf16": ["--bf16"], "fp8": ["--bf16", "--fp8-format", "hybrid"]}
RECOMPUTES = {
    "none": [],
    "selective": ["--recompute-activations"],
    "full": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
}
USUAL_BASE = 10_000.0
FAMILY_BASES = {"mixtral": 1_000_000.0}  # their classes in transformers have another default
# Built into Megatron's --use-rope-scaling; only the factor is an argument.
LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_sequence": 8192}
_NAMES = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence",
}


def megatron_arguments(model: ModelShape, layout: Layout, sequence: int, global_batch_sequences: int) -> list[str]:
    """Return pretrain_gpt.py's arguments for model, parallelism and batch; the user adds data, schedule and paths."""
    if layout.fsdp > 1 and layout.zero != 1:
        raise FrameworkError(f"Megatron's distributed optimizer is `zero: 1`, not `zero: {layout.zero}`; set `zero: 1`")
    if layout.precision not in PRECISIONS:
        raise FrameworkError(f"Megatron does not support precision {layout.precision}; use {', '.join(PRECISIONS)}")
    attention = _attention(model)
    numbers = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn_hidden,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--seq-length": sequence,
        "--max-position-embeddings": max(sequence, model.max_sequence),
        "--micro-batch-size": layout.micro_batch,
        "--global-batch-size": global_batch_sequences,
    }
    words = [word for name, number in numbers.items() for word in (name, str(number))]
    words += [*_rope(model), "--normalization", "RMSNorm", "--norm-epsilon", f"{norm_epsilon(model):g}"]
    words += _biases(model)
    words += ["--swiglu"] if model.gated_mlp else []
    words += [] if model.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    words += ["--qk-layernorm"] if model.qk_norm else []
    words += ["--sequence-parallel"] if layout.tp > 1 else []
    words += _optimizer(layout)
    return (
        words
        + attention
        + _experts(model, layout)
        + _stages(model, layout)
        + [
            *PRECISIONS[layout.precision],
            *RECOMPUTES[layout.recompute],
        ]
    )


def nemo_parallelism(layout: Layout) -> dict[str, int | bool | None]:
    """Return the parallelism as arguments of NeMo's MegatronStrategy."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.tp > 1,
    }


def _optimizer(layout: Layout) -> list[str]:
    """Megatron shards the state over all data-parallel ranks, unless they are split into one instance per replica."""
    if layout.fsdp == 1:
        return []
    copies = ["--num-distributed-optimizer-instances", str(layout.replicate)] if layout.replicate > 1 else []
    return ["--use-distributed-optimizer", *copies]


def _attention(model: ModelShape) -> list[str]:
    if model.mla is not None:
        raise FrameworkError(f"{model.name} uses multi-head latent attention (MLA), which this Megatron emitter lacks")
    if model.kv_heads == model.heads:
        return []
    return ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]


def _biases(model: ModelShape) -> list[str]:
    """No bias, or a QKV bias alone: Megatron's other bias option adds one to every linear layer."""
    with_bias = biases(model)
    if with_bias not in ((), ("qkv",)):
        raise FrameworkError(
            f"{model.name} has a bias in {' and '.join(with_bias)}; this Megatron emitter supports a bias only in qkv. "
            "Choose a model without the others"
        )
    return ["--disable-bias-linear", *(["--add-qkv-bias"] if with_bias else [])]


def _experts(model: ModelShape, layout: Layout) -> list[str]:
    if not model.is_moe:
        return []
    words = ["--num-experts", str(model.experts), "--moe-router-topk", str(model.top_k)]
    words += ["--moe-ffn-hidden-size", str(model.moe_ffn_hidden), "--expert-model-parallel-size", str(layout.ep)]
    if model.shared_experts:
        words += ["--moe-shared-expert-intermediate-size", str(model.shared_experts * model.moe_ffn_hidden)]
    if model.dense_layers:
        words += ["--moe-layer-freq", f"[0]*{model.dense_layers}+[1]*{model.moe_layers}"]
    return words


def _stages(model: ModelShape, layout: Layout) -> list[str]:
    if layout.vpp == 1:
        return []
    stages = layout.pp * layout.vpp
    if model.layers % stages:
        raise FrameworkError(f"Megatron needs equal stages: {model.layers} layers are not divisible by {stages} stages")
    return ["--num-layers-per-virtual-pipeline-stage", str(model.layers // stages)]


def _rope(model: ModelShape) -> list[str]:
    """Return the RoPE base and scaling arguments; FrameworkError for a scaling that Megatron does not have."""
    rope = _rope_of(model)
    base = float(rope.get("theta", USUAL_BASE))
    if not base.is_integer():
        raise FrameworkError(f"Megatron's --rotary-base takes an integer, and {model.name} has {base:g}")
    words = ["--position-embedding-type", "rope", "--rotary-base", f"{base:.0f}"]
    scaling = rope.get("scaling", "none")
    if scaling == "none":
        return words
    parameters = {name: rope.get(name, usual) for name, usual in LLAMA3.items()}
    if scaling != "llama3" or parameters != LLAMA3 or "factor" not in rope:
        numbers = f" with {parameters}" if scaling == "llama3" else ""
        raise FrameworkError(
            f"{model.name} uses RoPE scaling {scaling}{numbers}; Megatron supports only llama3 with {LLAMA3} and a "
            "factor. Choose a model without it, or train this one with kind pretrain"
        )
    return [*words, "--use-rope-scaling", "--rope-scaling-factor", f"{float(rope['factor']):g}"]


def _rope_of(model: ModelShape) -> Mapping[str, Any]:
    """Return the RoPE settings, by the names of the decoder's table."""
    config = config_of(model)
    return dict(preset_numbers(model).get("rope", {})) if config is None else _from_huggingface(config, model)


def _from_huggingface(config: Mapping[str, Any], model: ModelShape) -> dict[str, Any]:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`, the form before transformers 5."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise FrameworkError(f"{model.name} has partial RoPE ({partial:g} of a head), which Megatron's emitter lacks")
    usual = FAMILY_BASES.get(str(config.get("model_type")), USUAL_BASE)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return {
        "original_sequence": original or LLAMA3["original_sequence"],
        **{_NAMES.get(name, name): value for name, value in parameters.items()},
        "theta": parameters.get("rope_theta") or config.get("rope_theta") or usual,
        "scaling": "none" if kind == "default" else kind,
    }
