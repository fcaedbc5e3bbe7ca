"""What one step of a served model costs on a layout: seconds per unit of work, from measured rates alone.

Every field is a time on one GPU at the level of kernel benchmarks (`rates`), summed over the layers that a token
passes, or a size. `step_times` combines them with the constants of an engine. Fields of stacked terms are arrays.
Constants of small kernels come from data/measured_ops.json (TensorRT-LLM 1.3.0rc20 on H100, H200, B200 and GB200).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from craton.job.model import ROUNDED_AT_LOAD, ModelShape
from craton.planning.rates import MachineRates
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.served_model import kv_bytes_per_token, plain_in_int4

# Bytes of a stored weight with its share of the scales, and the precision that multiplies it.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53, "int4": 0.53}
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
# Time of a matmul beyond the reading of its weights: launch, quantization of the input, the serial loop over k.
SMALL_MATMUL_SECONDS = {
    "fp32": 5e-6,
    "bf16": 5e-6,
    "fp8": 9e-6,
    "fp8_block": 7e-6,
    "nvfp4": 12e-6,
    "mxfp4": 8e-6,
    "int4": 7e-6,
}
SMALL_EXPERT_SECONDS = 3e-5  # routing, sorting, two grouped matmuls and the sum of an MoE layer with few tokens
SMALL_ATTENTION_SECONDS = 1e-5  # decode attention of one layer with little context
ATTENTION_MEMORY = 0.85  # of the data sheet's bandwidth, decode attention over long contexts
LATENT_FLOPS_SHARE = 0.62  # of the bf16 peak: absorbed MLA decode with 128 heads
SMALL_REDUCE_SECONDS = 5e-6  # custom all-reduce of a few rows in one NVLink domain; NCCL takes 17 to 27 µs
SMALL_REDUCE_LINK = 0.45  # of the NVLink rate, all-reduce of 1 to 64 MB
FAR_REDUCE_SECONDS = 4e-5  # all-reduce of a few rows between NVLink domains
SMALL_EXCHANGE_SECONDS = 4e-5  # dispatch and combine of a few rows in one NVLink domain (DeepEP: 16 + 14 µs)
FAR_EXCHANGE_SECONDS = 3e-4  # the same between domains (DeepEP low latency over RDMA, 16 to 64 ranks)
QUANTIZED_LEVEL = 0.83  # 8- and 4-bit matmuls of 4096 tokens, of the best published; in bf16 they reach it
# Reads and writes of a routed row beside its matmuls, in Craton's layers whose experts are split over ranks: gathered,
# masked, permuted and summed; between the matmuls two halves are read and one is written.
OWN_ROW_PASSES, OWN_PRODUCT_PASSES = 7.0, 3.0
ELEMENTWISE_PASSES = 14.0  # reads and writes of the hidden state in a layer: norms, residuals, rotary, activations
SAMPLING_PASSES = 6.0  # over a row of fp32 logits: gather, scale, softmax, choice
SHARPNESS = 3.0  # of the maximum of two times on a GPU: near the crossing neither limit is reached
# Layers whose kernels the host launches as fast as those beside the attention of one layer of MLA or linear attention:
# 2 to 4 explain the published TTFT equally well. Our own MLA attends to latents in few kernels.
LATENT_LAUNCHES, OWN_LATENT_LAUNCHES = 3.0, 1.0
FIRST_TOKEN_LAYERS = 40.0  # up to so many, the time of a request outside its steps is that of HTTP and tokenizer
# Craton's scheduler spreads prompts over steps, which keeps each short for the requests in decode.
OWN_LEAST_TOKENS, OWN_PREFILL_STEPS = 512, 12.0
OWN_JOIN_STEPS = 1.5  # the next step is launched while one runs
# Its matmuls of one row and of more, in times of reading the bytes of the weight, measured on one H200: those of bf16
# take 1.0 and 1.1, those of 4 bits up to twice as long for 64 rows as for 2 to 16. fp8 matmuls quantize inputs first.
OWN_FP8_READS, OWN_INT4_READS = (1.1, 1.45), (2.1, 3.6)
OWN_FP8_LAUNCHES = 1.5
OWN_INT4_TOKENS = 64.0  # up to so many packed weights are multiplied; for more they are unpacked to bf16 in each step
GPU_SHARE = 0.9  # of the GPU's memory that an engine uses
WORKSPACE_BYTES = 4e9  # libraries, CUDA graphs, activations


@dataclass(frozen=True)
class ServedPrecision:
    """Precisions of a served model; None: as `weights` implies."""

    weights: str = "bf16"
    kv: str = "bf16"
    experts: str | None = None
    attention: str | None = None  # projections; NVFP4 and MXFP4 checkpoints of MoE models often leave them in bf16

    @property
    def expert_weights(self) -> str:
        return self.experts or self.weights

    @property
    def attention_weights(self) -> str:
        return self.attention or self.weights


@dataclass(frozen=True)
class ServingTerms:
    """Seconds on one GPU of one replica; `token`: of the tokens of one attention-data-parallel rank."""

    gpus: float  # of the replica
    attention_dp: float
    pp: float
    layers: float
    moe_layers: float
    launches: float  # layers, by the kernels that a step with prefill launches in each
    weights_seconds: float  # reading all dense weights
    row_read_slowdown: float  # of kernels that cannot read their format at the rate of a copy, for one row
    read_slowdown: float  # for more
    packing_seconds: float  # rearranging them before more than `unpacked_tokens` are multiplied
    unpacked_tokens: float
    token_seconds: float  # multiplying a token with them
    sharpness: float  # of the maximum of reading and multiplying; 1: one after the other, as on a CPU
    elementwise_token_seconds: float
    matmul_floor_seconds: float  # of all matmuls together
    expert_read_seconds: float  # reading all experts of this GPU
    expert_token_seconds: float  # of one token of the stage, routed evenly
    expert_floor_seconds: float
    expert_groups: float  # of ranks that share a stage's tokens, each with all experts
    unused_share: float  # probability that a token does not use an expert
    context_seconds: float  # reading one token of a request's KV cache
    window_context_seconds: float  # the same in layers with a window
    window: float
    context_flops_seconds: float  # absorbed MLA multiplies every cached token with all heads
    attention_floor_seconds: float
    pair_seconds: float  # prefill: one query with one key
    window_pair_seconds: float
    extra_keys: float
    head_seconds: float
    head_token_seconds: float
    sampling_seconds: float  # of one row of logits
    collective_floor_seconds: float
    collective_token_seconds: float
    kv_tokens: float  # of the replica
    step_tokens: float  # prompt tokens of a step, at most
    least_tokens: float  # of a step with decode, if as many prompt tokens wait
    prefill_steps: float  # over which more tokens are spread
    join_steps: float  # from a request's arrival to the step that begins its prefill
    max_running: float

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0

    @property
    def first_token_factor(self) -> Any:
        """Return how much longer than for a small model a request waits outside its steps. The host launches a prefill
        kernel by kernel before the GPU has its first: its time grows with layers and the kernels of each."""
        return np.maximum(self.launches / FIRST_TOKEN_LAYERS, 1.0)


def stack_terms(rows: Sequence[ServingTerms]) -> ServingTerms:
    """Return terms whose fields are arrays, one entry a row."""
    return ServingTerms(
        **{field.name: np.array([getattr(row, field.name) for row in rows], float) for field in fields(ServingTerms)}  # type: ignore[arg-type]
    )


def serving_terms(
    shape: ModelShape,
    machine: MachineRates,
    layout: ServedLayout,
    precision: ServedPrecision,
    step_tokens: int = 8192,
    max_running: int = 2048,
    *,
    is_own: bool = False,
) -> ServingTerms:
    """Return the terms of a model on one replica of a layout. `is_own`: of Craton's engine, which copies experts where
    ep does not split them, whose prefill attends to latents without expanding them, and which spreads prompts."""
    rates, is_cpu = machine.rates, machine.gpu.generation == "cpu"
    tp, pp, hidden, mla = layout.tp, layout.pp, shape.hidden, shape.mla
    stream = rates.streaming_bytes_per_second
    attention, experts = precision.attention_weights, precision.expert_weights
    dense_layers = shape.layers - shape.moe_layers

    # Parameters of one GPU's shard, over all layers. MLA's projections to the latents are replicated.
    if mla is None:
        kv_part = 2 * hidden * shape.head_dim * shape.kv_heads
        kv_ranks = min(tp, shape.kv_heads)
        attention_parameters = (shape.attention_parameters - kv_part) / tp + kv_part / kv_ranks
    else:
        latent = hidden * (mla.q_lora + mla.kv_lora + mla.qk_rope)
        attention_parameters = latent + (shape.attention_parameters - latent) / tp
        kv_ranks = 1
    attention_parameters *= shape.layers
    mlp = (dense_layers * shape.dense_mlp_parameters + shape.moe_layers * shape.shared_expert_parameters) / tp
    router = shape.moe_layers * shape.router_parameters
    expert_ranks = layout.ep * layout.moe_tp
    holders = layout.ep if is_own else expert_ranks
    expert_parameters = shape.moe_layers * shape.experts * shape.expert_parameters / holders
    plain = "fp32" if precision.weights == "fp32" else "bf16"  # of what is never quantized
    plain_bytes = WEIGHT_BYTES[plain]
    # Published 4-bit checkpoints of MoE models treat their other MLPs like the experts; our engine does not.
    mlp_weights = precision.weights if not shape.is_moe or is_own else experts
    is_own_int4 = is_own and precision.weights == "int4"
    sizes = WEIGHT_BYTES
    if is_own_int4:
        sizes = {**WEIGHT_BYTES, "int4": (shape.int4 or ROUNDED_AT_LOAD).bytes_per_weight(hidden)}

    passes = shape.layers * ELEMENTWISE_PASSES * hidden * plain_bytes
    if is_own:  # a rank also moves the rows of the experts that others in its group have
        row = (OWN_ROW_PASSES * hidden + OWN_PRODUCT_PASSES * shape.moe_ffn_hidden) * plain_bytes
        passes += shape.moe_layers * shape.top_k * row * (layout.ep - 1) / expert_ranks
    weight_bytes = attention_parameters * sizes[attention] + mlp * sizes[mlp_weights]
    if is_own_int4:
        weight_bytes += plain_in_int4(shape, tp) * (plain_bytes - sizes["int4"])
    weight_bytes += router * plain_bytes
    is_own_fp8 = is_own and precision.weights == "fp8"
    packed_bytes = weight_bytes if is_cpu and plain == "fp32" else 0.0
    if is_own_int4:  # written in bf16 and read again
        packed_bytes = 2 * plain_bytes * (attention_parameters + mlp)
    expert_bytes = expert_parameters * sizes[experts]
    table_bytes = plain_bytes * shape.embedding_parameters / tp
    multiply = 2.0 * attention_parameters / _flops(attention, rates.matrix_flops)
    multiply += 2.0 * mlp / _flops(mlp_weights, rates.matrix_flops)
    multiply += 2.0 * router / rates.matrix_flops[plain]
    expert_flops = _flops(experts, rates.matrix_flops) * rates.grouped_level
    routed = shape.moe_layers * shape.top_k * shape.expert_parameters / expert_ranks

    # KV cache. Grouped heads are sharded while there are enough of them; every rank holds MLA's latents.
    token_bytes = kv_bytes_per_token(shape, KV_BYTES[precision.kv]) / kv_ranks / shape.layers
    latent_flops = 0.0
    width, value_width = shape.head_dim, shape.head_dim
    if mla is not None:
        width, value_width = mla.qk_nope + mla.qk_rope, mla.v_head
        latent_flops = 2.0 * shape.heads / tp * (2 * mla.kv_lora + mla.qk_rope)
        if is_own:
            width, value_width = mla.kv_lora + mla.qk_rope, mla.kv_lora
    sliding = shape.sliding_layers if shape.sliding_window else 0
    whole = shape.layers - sliding
    read = rates.memory_bytes_per_second * ATTENTION_MEMORY
    kernel = rates.attention["best"]
    attention_flops = rates.peak_flops[plain] * kernel.efficiency(0.5 * (width + value_width), False)
    pair = shape.heads / tp * 2.0 * (width + value_width) / attention_flops

    # Sparse attention over latents selects tokens but keeps all of them.
    stored_layers = shape.layers if mla else whole or shape.layers
    weights = (weight_bytes + expert_bytes) / pp + 2.0 * table_bytes
    free = GPU_SHARE * machine.gpu.memory_bytes - weights - WORKSPACE_BYTES
    rank_tokens = free / (token_bytes * stored_layers / pp)

    special_layers = shape.layers if mla else shape.linear_layers
    special = (OWN_LATENT_LAUNCHES if is_own else LATENT_LAUNCHES) * special_layers
    launches = shape.layers + special + shape.moe_layers

    reads = OWN_FP8_READS if is_own_fp8 else OWN_INT4_READS if is_own_int4 and not is_cpu else (1.0, 1.0)
    floor, moved = _collectives(shape, machine, layout, _own_reductions(shape, layout) if is_own else None)
    return ServingTerms(
        gpus=layout.replica_gpus,
        attention_dp=layout.attention_dp,
        pp=pp,
        layers=shape.layers,
        moe_layers=shape.moe_layers,
        launches=launches * (OWN_FP8_LAUNCHES if is_own_fp8 else 1.0),
        weights_seconds=weight_bytes / stream,
        row_read_slowdown=reads[0],
        read_slowdown=reads[1],
        packing_seconds=packed_bytes / stream,
        unpacked_tokens=OWN_INT4_TOKENS if is_own_int4 and not is_cpu else 0.0 if is_own_int4 else 1.0,
        token_seconds=multiply,
        sharpness=1.0 if is_cpu else SHARPNESS,
        elementwise_token_seconds=passes / rates.elementwise_bytes_per_second,
        matmul_floor_seconds=shape.layers * (5 if mla else 2) * SMALL_MATMUL_SECONDS[attention]
        + (dense_layers + (shape.moe_layers if shape.shared_experts else 0)) * 2 * SMALL_MATMUL_SECONDS[mlp_weights],
        expert_read_seconds=expert_bytes / stream,
        expert_token_seconds=2.0 * routed / expert_flops,
        expert_floor_seconds=shape.moe_layers * SMALL_EXPERT_SECONDS,
        expert_groups=layout.moe_tp if is_own else 1.0,
        unused_share=1.0 - shape.top_k / shape.experts if shape.is_moe else 1.0,
        context_seconds=whole * token_bytes / read,
        window_context_seconds=sliding * token_bytes / read,
        window=float(shape.sliding_window or 1),
        context_flops_seconds=shape.layers * latent_flops / (rates.peak_flops["bf16"] * LATENT_FLOPS_SHARE),
        attention_floor_seconds=shape.layers * SMALL_ATTENTION_SECONDS,
        pair_seconds=whole * pair,
        window_pair_seconds=sliding * pair,
        extra_keys=kernel.extra_keys_forward,
        head_seconds=table_bytes / stream,
        head_token_seconds=2.0 * shape.embedding_parameters / tp / rates.matrix_flops[plain],
        sampling_seconds=SAMPLING_PASSES * 4.0 * shape.vocab / stream,
        collective_floor_seconds=floor,
        collective_token_seconds=moved,
        kv_tokens=max(0.0, rank_tokens) * layout.attention_dp,
        step_tokens=step_tokens,
        least_tokens=min(OWN_LEAST_TOKENS, step_tokens) if is_own else step_tokens,
        prefill_steps=OWN_PREFILL_STEPS if is_own else 1.0,
        join_steps=OWN_JOIN_STEPS if is_own else 0.5,
        max_running=max_running,
    )


def _own_reductions(shape: ModelShape, layout: ServedLayout) -> dict[int, int]:
    """Return how many pairs of an all-gather and a reduce-scatter a step of Craton's engine has, by the ranks that take
    part: of attention, dense MLPs, shared experts and split experts. Those of both kinds of experts are one pair where
    their ranks are the same."""
    tp, ep = layout.tp, layout.ep
    reductions = {tp: 2 * shape.layers - shape.moe_layers}
    if shape.shared_experts and ep != tp:
        reductions[tp] += shape.moe_layers
    if ep > 1:
        reductions[ep] = reductions.get(ep, 0) + shape.moe_layers
    return reductions


def _collectives(
    shape: ModelShape, machine: MachineRates, layout: ServedLayout, reductions: Mapping[int, int] | None = None
) -> tuple[float, float]:
    """Return seconds of all collectives of a step with few tokens, and seconds per token of a rank. `reductions`: by
    the ranks that take part in each, of the tokens of these ranks; None: of attention and MLP, over all ranks of tp."""
    network, tp = machine.network, layout.tp
    floor = moved = 0.0
    size = shape.hidden * 2.0  # bytes of a token's hidden state
    if tp > 1:
        near = tp <= network.nvlink_domain
        rate = network.nvlink_bytes_per_second * SMALL_REDUCE_LINK
        if not near:
            rate = min(rate, network.nic_bytes_per_second * network.network_efficiency * network.node_gpus / 2.0)
        for ranks, count in (reductions or {tp: 2 * shape.layers}).items():
            floor += count * (SMALL_REDUCE_SECONDS if near else FAR_REDUCE_SECONDS)
            moved += count * 2.0 * (ranks - 1) / tp * size / rate
    ranks = layout.stage_gpus
    if shape.is_moe and layout.attention_dp > 1:
        near = ranks <= network.nvlink_domain
        rate = network.nvlink_bytes_per_second * network.nvlink_pair_efficiency
        if not near:
            rate = network.nic_bytes_per_second * network.network_pair_efficiency
        # Tokens in 8 bits to their experts, sums in 16 bits back; never more than all tokens to all ranks.
        copies = min(1.5 * shape.top_k / tp, 2.0 * (layout.attention_dp - 1))
        if not near:  # one copy for each node that has an expert of the token
            domains = ranks / network.nvlink_domain
            copies = 1.5 * (domains - 1.0) * (1.0 - (1.0 - 1.0 / domains) ** shape.top_k)
        floor += shape.moe_layers * (SMALL_EXCHANGE_SECONDS if near else FAR_EXCHANGE_SECONDS)
        moved += shape.moe_layers * copies * size / rate
    return floor, moved


def _flops(weights: str, flops: Mapping[str, float]) -> float:
    """Return the rate of matmuls with such weights: 4-bit weights without 4-bit matmuls are widened to bf16."""
    if weights == "fp8_block":
        return QUANTIZED_LEVEL * flops.get("mxfp8", flops["bf16"])
    if weights == "nvfp4":
        return QUANTIZED_LEVEL * flops["nvfp4"] if flops["nvfp4"] > flops["fp8"] else flops["bf16"]
    if weights == "mxfp4":
        return QUANTIZED_LEVEL * flops["fp8"] if flops["nvfp4"] > flops["fp8"] else flops["bf16"]
    if weights == "fp8" and flops.get("fp8", 0.0) > flops["bf16"]:
        return QUANTIZED_LEVEL * flops["fp8"]
    return flops["bf16"] if weights in ("int4", "fp8") else flops[weights]
