"""Software profiles: the features of a training stack (traits) and its efficiency (constants).

Step time of the same layout changes by 6 to 26% between releases of one stack, so constants belong to a stack, a
version and a GPU. Every constant is positive and is fitted in logs; a prior gives its median and spread for an unknown
stack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

AttentionKernel = Literal["best", "flash2", "unfused"]
Dispatcher = Literal["nccl", "deepep", "hybridep", "loop"]
Selective = Literal["attention", "operators", "every second layer", "modules", "element-wise"]


@dataclass(frozen=True)
class Traits:
    """Features of a stack, according to its documentation."""

    attention: AttentionKernel = "best"  # unfused: two batched matmuls and a softmax over sequence²
    compiled: bool = True  # element-wise chains are fused
    tensor_overlap: bool = False  # tensor-parallel collectives hidden behind their own matmuls
    expert_overlap: bool = False  # all-to-all of one micro-batch behind the compute of another
    dispatcher: Dispatcher = "nccl"  # moves tokens to experts; loop: one matmul per expert, no tokens moved
    sequence_parallel: bool = True  # tensor parallelism splits the norms' tokens too
    gradient_overlap: bool = True  # gradients are reduced during backward
    selective: Selective = "attention"  # what `recompute: selective` repeats
    master_gradients: bool = False  # gradients reduced in fp32
    chunked_head: bool = False  # the loss never holds tokens × vocabulary at once
    zero_bubble: bool = False  # has a zero-bubble pipeline schedule
    repeats_gate: bool = False  # the MLP's gated matmul is recomputed in the backward pass, not saved
    saves_both_widths: bool = True  # checkpoints hold 16-bit weights beside the fp32 ones
    fsdp2: bool = False  # weights always use FSDP2: fp32 shards, over context-parallel ranks too
    own_layers: bool = False  # the decoder of craton/ml/models, whose saved tensors are counted one by one
    multi_token: bool = True  # trains the multi-token-prediction layers of models that have them
    fused_experts: bool = False  # matmul, activation and cast of experts in one kernel, whole steps in CUDA graphs
    no_host_waits: bool = False  # the host never waits for the device within a step: losses and norms are read later


@dataclass(frozen=True)
class Constant:
    name: str
    prior: float  # the median over stacks
    spread: float  # standard deviation of its logarithm between stacks
    meaning: str


CONSTANTS: tuple[Constant, ...] = (
    Constant("gemm_efficiency", 0.90, 0.12, "16-bit matmuls, relative to the measured kernel curve"),
    Constant("fp8_efficiency", 0.96, 0.12, "the same in fp8 with one scale per tensor or row"),
    Constant("mxfp8_efficiency", 0.86, 0.12, "the same in fp8 with one scale per block"),
    Constant("fp4_efficiency", 0.76, 0.25, "the same in nvfp4"),
    Constant("expert_efficiency", 0.95, 0.25, "grouped matmuls of experts, on top of the above"),
    Constant("attention_efficiency", 0.85, 0.25, "attention, relative to the measured kernel curve"),
    Constant("elementwise_passes", 0.95, 0.30, "memory traffic of norms, activations, residuals, casts, over minimum"),
    Constant("launch_seconds", 3e-6, 0.60, "exposed host time per kernel launch"),
    Constant("tensor_exposed", 0.95, 0.40, "share of tensor-parallel communication that is not hidden"),
    Constant("shard_contention", 0.40, 0.50, "compute slowdown per second of hidden gather or reduction"),
    Constant("network_slowdown", 1.15, 0.30, "network collectives inside a step, relative to the collective alone"),
    Constant("nvlink_slowdown", 1.10, 0.25, "the same inside an NVLink domain"),
    Constant("expert_exposed", 0.65, 0.30, "share of the expert all-to-all that is not hidden"),
    Constant("permute_passes", 2.5, 0.35, "memory traffic of routing, permutation and combination, over minimum"),
    Constant("dispatch_seconds", 1.2e-3, 1.6, "exposed host time of one dispatch to experts and back"),
    Constant("recompute_cost", 1.05, 0.15, "time of recomputed operators, relative to their forward pass"),
    Constant("bubble", 1.20, 0.30, "pipeline bubble and stage imbalance, relative to the formula"),
    Constant("optimizer_passes", 1.35, 0.40, "memory traffic of the optimizer step, over minimum"),
    Constant("step_overhead_seconds", 0.025, 0.80, "per step: gradient clipping, logging, host synchronisation"),
    Constant("straggle", 0.0050, 0.50, "slowdown per doubling of the nodes"),
)
NAMES: tuple[str, ...] = tuple(constant.name for constant in CONSTANTS)
INDEX: dict[str, int] = {name: position for position, name in enumerate(NAMES)}
PRIOR_LOG: tuple[float, ...] = tuple(math.log(constant.prior) for constant in CONSTANTS)
SPREAD: tuple[float, ...] = tuple(constant.spread for constant in CONSTANTS)


# Effect of documented traits on a constant before anything is measured: factors on the prior.
TRAIT_FACTORS: dict[str, dict[str, float]] = {
    "not compiled": {"elementwise_passes": 1.4, "launch_seconds": 1.4},
    # metrics are read a step late, clipping is part of one fused update: measured on an H200, docs/measurements.md
    "no host waits": {"step_overhead_seconds": 0.04, "optimizer_passes": 0.85},
    "tensor overlap": {"tensor_exposed": 0.55},
    "expert overlap": {"expert_exposed": 0.5},
    "hybridep": {"dispatch_seconds": 0.35, "expert_exposed": 0.7},
    # no host wait for token counts, few launches, less traffic: documented, the factors are assumed
    "fused experts": {
        "dispatch_seconds": 0.1,
        "launch_seconds": 0.3,
        "permute_passes": 0.5,
        "elementwise_passes": 0.75,
    },
    "loop": {"dispatch_seconds": 10.0, "expert_efficiency": 0.6},
}


def prior_log(traits: Traits) -> tuple[float, ...]:
    """Return the expected log-constants of a stack with these traits."""
    labels = [
        *(() if traits.compiled else ("not compiled",)),
        *(("tensor overlap",) if traits.tensor_overlap else ()),
        *(("expert overlap",) if traits.expert_overlap else ()),
        *(("no host waits",) if traits.no_host_waits else ()),
        *(("fused experts",) if traits.fused_experts else ()),
        traits.dispatcher,
    ]
    logs = list(PRIOR_LOG)
    for label in labels:
        for name, factor in TRAIT_FACTORS.get(label, {}).items():
            logs[INDEX[name]] += math.log(factor)
    return tuple(logs)


@dataclass(frozen=True)
class SoftwareProfile:
    """Constants of one stack and version on one GPU, with their covariance."""

    name: str
    gpu: str  # "" for any
    traits: Traits
    log_constants: tuple[float, ...]  # in the order of NAMES
    log_scale: float  # residual factor on every step that the constants do not explain
    covariance: tuple[tuple[float, ...], ...]  # of log_constants followed by log_scale
    own_cluster: float  # standard deviation of log(step) that a cluster unlike the fitted ones may add
    calibrated: bool = False
    source: str = ""
    rows: int = 0
    unidentified: tuple[str, ...] = field(default=())
    unexplained_factor: float = 1.0  # on what no constant explains: how well one set of constants fits the logged runs

    @property
    def label(self) -> str:
        return f"{self.name} on {self.gpu}" if self.gpu else self.name
