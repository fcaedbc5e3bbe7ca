"""Constants of a serving engine: how far its steps are from kernel benchmarks, and its fixed times.

Each constant has a prior, from kernel benchmarks and engine sources, and a spread: the standard deviation of its
logarithm between engines, versions and GPUs. The fit of `craton.planning.calibration` moves them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConstant:
    name: str
    prior: float
    spread: float
    meaning: str


ENGINE_CONSTANTS: tuple[EngineConstant, ...] = (
    EngineConstant("matmul_rate", 0.75, 0.25, "large matmuls, of the best benchmark"),
    EngineConstant("weight_rate", 0.85, 0.25, "reading weights in decode, of a streaming kernel"),
    EngineConstant("kv_rate", 0.80, 0.35, "decode attention, of its best kernel"),
    EngineConstant("prefill_attention_rate", 0.75, 0.40, "prefill attention, of its best kernel"),
    EngineConstant("expert_rate", 0.70, 0.35, "grouped matmuls of experts, with uneven routing"),
    EngineConstant("kernel_slowdown", 1.0, 0.40, "fixed time of small matmuls, attention and expert kernels"),
    EngineConstant("layer_seconds", 1.0e-5, 0.60, "norms, rotary embedding, casts and gaps of a layer"),
    EngineConstant("step_seconds", 1.0e-3, 0.80, "scheduling, sampling and copies of a step"),
    EngineConstant("request_seconds", 1.0e-5, 0.80, "scheduling, sampling and streaming of a request in a step"),
    EngineConstant("collective_slowdown", 1.3, 0.40, "collectives, of their best kernels"),
    EngineConstant("prefill_slowdown", 1.1, 0.35, "prefill inside a step with decode, of prefill alone"),
    EngineConstant("prefill_layer_seconds", 1.5e-4, 0.60, "minimum time of a layer in a step with prefill"),
    EngineConstant("first_token_seconds", 1.5e-2, 0.70, "HTTP, tokenizer and scheduling of a request"),
    EngineConstant("burst", 1.0, 0.60, "share of the start burst in a mean TTFT, of requests in the first wave"),
    EngineConstant("kv_share", 0.85, 0.20, "share of the KV cache that requests fill"),
)
ENGINE_NAMES = tuple(constant.name for constant in ENGINE_CONSTANTS)
ENGINE_SPREAD = tuple(constant.spread for constant in ENGINE_CONSTANTS)
ENGINE_PRIOR_LOG = tuple(math.log(constant.prior) for constant in ENGINE_CONSTANTS)
