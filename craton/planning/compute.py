"""What one layer costs one rank for one micro-batch, operator by operator, before any software constant.

Times are those of the measured kernel curves; traffic is the least that the operator can move; communication is the
collective alone. `training.compose` turns them into a step with the constants of a software profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from craton.job import Layout, ModelShape
from craton.planning.collectives import (
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from craton.planning.kernels import OUTPUT_BYTES, GpuRates, attention_seconds, gemm_seconds, grouped_gemm_seconds
from craton.planning.software import Traits

# Kernels a layer launches forward; backward launches about twice as many. Counted from profiles of a Llama block in
# eager PyTorch and compiled, and of a grouped-GEMM MoE block; the profile's launch_seconds scales them.
KERNELS = {"eager": 24, "compiled": 12, "experts": 30, "expert loop": 12}
SCORE_BYTES = (
    14.0  # traffic per attention score of an unfused softmax with mask and dropout (planning note, 2022 stacks)
)


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Seconds of one layer (or of embedding and head) for one micro-batch, forward and backward."""

    gemm: tuple[float, float]
    experts: tuple[float, float]  # grouped products
    attention: tuple[float, float]
    elementwise: tuple[float, float]
    permute: tuple[float, float]
    kernels: tuple[float, float]  # a count
    tensor: tuple[float, float]  # collectives of tensor parallelism
    context: tuple[float, float]
    exchange: tuple[float, float]  # all-to-all of experts
    dispatches: tuple[float, float]  # a count: times the host waits to learn how many tokens each expert got
    parameters: float  # on this rank, before FSDP
    expert_parameters: float


def group_of(size: int, stride: int, network: Network) -> Group:
    """The ranks of one mesh dimension: `size` ranks, `stride` apart in the global order."""
    per_domain = max(1, min(size, network.nvlink_domain // stride))
    per_node = max(1, min(size, network.node_gpus // stride))
    spans = bool(network.leaf_gpus) and size * stride > network.leaf_gpus
    return Group(size, per_domain, per_node, spans, min(stride, network.node_gpus))


def layer_terms(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    gpu: GpuRates,
    network: Network,
    traits: Traits,
    *,
    moe: bool,
    lora: bool = False,
    imbalance: float = 1.0,
    expert_stride: int = 1,
) -> LayerTerms:
    """One transformer layer on one rank. Of the layout only tp, cp, ep, micro_batch and precision count here.

    `expert_stride`: how far apart the ranks of an expert exchange are.
    """
    tp, cp = layout.tp, layout.cp
    hidden = shape.hidden
    tokens = layout.micro_batch * sequence / cp  # a tensor-parallel group's tokens in one micro-batch
    low = layout.precision not in ("bf16", "fp16", "fp32")
    forward = backward = 0.0
    activations = 0.0  # elements that pass a quantizer, for low precision
    parameters = 0.0
    for n, k in attention_products(shape, tp):
        f, b = linear_seconds(tokens, n, k, layout.precision, gpu, lora)
        forward, backward = forward + f, backward + b
        activations += tokens * (n + k)
        parameters += n * k
    value_dim = shape.mla.v_head if shape.mla else shape.head_dim
    query_dim = shape.mla.qk_nope + shape.mla.qk_rope if shape.mla else shape.head_dim
    attention = _attention(shape, layout, sequence, gpu, traits, query_dim, value_dim)

    experts = permute = exchange = (0.0, 0.0)
    expert_parameters = 0.0
    kernels = float(KERNELS["compiled" if traits.compiled else "eager"])
    if moe:
        routed, inner = shape.top_k, shape.moe_ffn_hidden
        local_experts = max(1, shape.experts // layout.ep)
        rows = tokens * routed / tp  # assignments a rank computes when routing is balanced
        per_expert = rows / local_experts
        up = (2 if shape.gated_mlp else 1) * inner
        e_forward = e_backward = 0.0
        for n, k in ((up, hidden), (hidden, inner)):
            f, b = expert_seconds(per_expert, n, k, local_experts, layout.precision, gpu, traits, imbalance, lora)
            e_forward, e_backward = e_forward + f, e_backward + b
        experts = (e_forward, e_backward)
        expert_parameters = local_experts * shape.expert_parameters
        if shape.shared_experts:
            shared = shape.shared_experts * inner
            for n, k in (((2 if shape.gated_mlp else 1) * shared / tp, hidden), (hidden, shared / tp)):
                f, b = linear_seconds(tokens, n, k, layout.precision, gpu, lora)
                forward, backward = forward + f, backward + b
                parameters += n * k
        parameters += shape.router_parameters
        moved = rows * hidden * 2.0
        # permute and un-permute: each assignment is read and written once before and once after its expert
        permute_bytes = 4.0 * moved + rows * (up + inner) * 2.0
        rate = gpu.elementwise_bytes_per_second
        permute = (permute_bytes / rate, 1.5 * permute_bytes / rate)
        kernels += KERNELS["experts"] if traits.dispatcher != "loop" else KERNELS["expert loop"] * local_experts
        if layout.ep > 1:
            group = group_of(layout.ep, expert_stride, network)
            copies = distinct_nodes_share(routed, group) if traits.dispatcher in ("deepep", "hybridep") else 1.0
            one_way = all_to_all_seconds(copies * moved, group, network)
            exchange = (2.0 * one_way, 2.0 * one_way)
        ffn_elements = 0.0
        activations += rows * (hidden + up)
    else:
        width = shape.ffn_hidden / tp
        gated = (2 if shape.gated_mlp else 1) * width
        for n, k in ((gated, hidden), (hidden, width)):
            f, b = linear_seconds(tokens, n, k, layout.precision, gpu, lora)
            forward, backward = forward + f, backward + b
            parameters += n * k
        ffn_elements = tokens * (gated + width)
        activations += tokens * (hidden + gated)

    heads_width = (shape.heads + shape.kv_heads) * query_dim / tp
    elements = 10.0 * tokens * hidden / tp + 2.0 * tokens * heads_width + ffn_elements
    traffic = OUTPUT_BYTES[layout.precision] * elements + (3.0 * activations if low else 0.0)
    rate = gpu.elementwise_bytes_per_second
    scores = 0.0 if traits.attention != "unfused" else SCORE_BYTES * tokens * sequence * shape.heads / tp
    elementwise = ((traffic + scores) / rate, (2.0 * traffic + 1.5 * scores) / rate)

    tensor = (0.0, 0.0)
    if tp > 1:
        # with sequence parallelism two all-gathers and two reduce-scatters forward, one more gather backward
        group, size = group_of(tp, 1, network), 2.0 * tokens * hidden
        gather = all_gather_seconds(size, group, network)
        scatter = reduce_scatter_seconds(size, group, network)
        pairs = 1.0 if moe and not shape.shared_experts else 2.0
        if not traits.sequence_parallel:
            reduce = all_reduce_seconds(size, group, network)
            tensor = (pairs * reduce, pairs * reduce)
        else:
            tensor = (pairs * (gather + scatter), pairs * (gather + scatter) + pairs * gather)
    context = (0.0, 0.0)
    if cp > 1:
        # ring or all-gather of keys and values; backward returns their gradients too
        width = shape.mla.kv_lora + shape.mla.qk_rope if shape.mla else 2.0 * shape.kv_heads * shape.head_dim / tp
        size = 2.0 * layout.micro_batch * sequence * width
        one = all_gather_seconds(size, group_of(cp, tp, network), network)
        context = (one, 2.0 * one)

    return LayerTerms(
        gemm=(forward, backward),
        experts=experts,
        attention=attention,
        elementwise=elementwise,
        permute=permute,
        kernels=(kernels, 2.0 * kernels),
        tensor=tensor,
        context=context,
        exchange=exchange,
        dispatches=(1.0, 1.0) if moe else (0.0, 0.0),
        parameters=parameters,
        expert_parameters=expert_parameters,
    )


def head_terms(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    gpu: GpuRates,
    network: Network,
    *,
    lora: bool = False,
) -> LayerTerms:
    """Final projection and cross-entropy, on the stage that holds them. Stays in 16 bit whatever the layers use."""
    tokens = layout.micro_batch * sequence / layout.cp
    width = shape.vocab / layout.tp
    precision = "fp32" if layout.precision == "fp32" else "bf16"
    gemm = linear_seconds(tokens, width, shape.hidden, precision, gpu, lora)
    rate = gpu.elementwise_bytes_per_second
    logits = tokens * width * OUTPUT_BYTES[precision] / 2.0
    tensor = (0.0, 0.0)
    if layout.tp > 1:
        one = all_gather_seconds(2.0 * tokens * shape.hidden, group_of(layout.tp, 1, network), network)
        tensor = (one, one)
    parameters = width * shape.hidden
    zero = (0.0, 0.0)
    return LayerTerms(
        gemm=gemm,
        experts=zero,
        attention=zero,
        # logits written, read and upcast by the softmax, its gradient written and read again: bytes at 16 bit
        elementwise=(logits * 10.0 / rate, logits * 8.0 / rate),
        permute=zero,
        kernels=(8.0, 10.0),
        tensor=tensor,
        context=zero,
        exchange=zero,
        dispatches=zero,
        parameters=parameters,
        expert_parameters=0.0,
    )


def distinct_nodes_share(top_k: int, group: Group) -> float:
    """Copies of a token that leave a rank when a node gets only one, over one copy an expert."""
    domains = -(-group.size // group.per_domain)
    if domains == 1:
        return 1.0
    return min(1.0, domains * (1.0 - (1.0 - 1.0 / domains) ** top_k) / top_k)


def attention_products(shape: ModelShape, tp: int) -> tuple[tuple[float, float], ...]:
    """(n, k) of the attention projections of one rank. Key/value heads fewer than tp are copied, not split."""
    hidden = shape.hidden
    if shape.mla is None:
        kv_heads = max(shape.kv_heads / tp, 1.0)
        width = (shape.heads / tp + 2.0 * kv_heads) * shape.head_dim
        return ((width, hidden), (hidden, shape.heads * shape.head_dim / tp))
    mla = shape.mla
    query = shape.heads * (mla.qk_nope + mla.qk_rope) / tp
    down = ((mla.q_lora, hidden), (query, mla.q_lora)) if mla.q_lora else ((query, hidden),)
    return (
        *down,
        (mla.kv_lora + mla.qk_rope, hidden),
        (shape.heads * (mla.qk_nope + mla.v_head) / tp, mla.kv_lora),
        (hidden, shape.heads * mla.v_head / tp),
    )


def linear_seconds(tokens: float, n: float, k: float, precision: str, gpu: GpuRates, lora: bool) -> tuple[float, float]:
    """Forward, and backward = gradients of input and weight, each at its own shape; frozen weights have no gradient."""
    forward = gemm_seconds(tokens, n, k, precision, gpu)
    backward = gemm_seconds(tokens, k, n, precision, gpu)
    if not lora:
        backward += gemm_seconds(n, k, tokens, precision, gpu)
    return forward, backward


def expert_seconds(
    rows: float,
    n: float,
    k: float,
    experts: int,
    precision: str,
    gpu: GpuRates,
    traits: Traits,
    imbalance: float,
    lora: bool,
) -> tuple[float, float]:
    if traits.dispatcher == "loop":
        forward, backward = linear_seconds(rows * imbalance, n, k, precision, gpu, lora)
        return experts * forward, experts * backward
    forward = grouped_gemm_seconds(rows, n, k, experts, precision, gpu, imbalance)
    backward = grouped_gemm_seconds(rows, k, n, experts, precision, gpu, imbalance)
    if not lora:
        backward += grouped_gemm_seconds(n, k, rows, experts, precision, gpu, imbalance)
    return forward, backward


def _attention(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    gpu: GpuRates,
    traits: Traits,
    query_dim: int,
    value_dim: int,
) -> tuple[float, float]:
    heads = max(shape.heads / layout.tp, 1.0)
    batch, queries = layout.micro_batch, sequence / layout.cp
    if traits.attention == "unfused":
        precision = layout.precision if layout.precision in ("fp32", "fp16", "bf16") else "bf16"
        count = batch * heads
        product = gemm_seconds(queries, sequence, query_dim, precision, gpu, count)
        product += gemm_seconds(queries, value_dim, sequence, precision, gpu, count)
        return (product, 2.0 * product)
    kernel: Literal["best", "flash2"] = "flash2" if traits.attention == "flash2" else "best"
    kv_heads = max(shape.kv_heads / layout.tp, 1.0)

    def seconds(keys: float, causal: bool, backward: bool) -> float:
        return attention_seconds(
            batch,
            queries,
            keys,
            heads,
            kv_heads,
            query_dim,
            gpu,
            causal=causal,
            backward=backward,
            value_dim=value_dim,
            precision="fp32" if layout.precision == "fp32" else "bf16",
            kernel=kernel,
        )

    full = (seconds(sequence, shape.causal, False), seconds(sequence, shape.causal, True))
    if not shape.sliding_window or sequence <= shape.sliding_window:
        return full
    share = shape.sliding_layers / shape.layers
    window = (seconds(shape.sliding_window, False, False), seconds(shape.sliding_window, False, True))
    return (
        full[0] * (1 - share) + min(window[0], full[0]) * share,
        full[1] * (1 - share) + min(window[1], full[1]) * share,
    )
