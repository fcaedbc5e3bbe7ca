"""Time of one layer on one rank for one micro-batch, operator by operator, without software constants.

Sizes come from `operations`; times from the measured kernel curves; memory traffic is the minimum of the operator;
communication is the collective alone. `compose` turns them into a step with the constants of a software profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.rates import (
    OUTPUT_BYTES,
    GpuRates,
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    attention_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    reduce_scatter_seconds,
)
from craton.planning.software import Traits
from craton.planning.step.operations import (
    AttentionCall,
    Dimension,
    Operations,
    Product,
    Transfer,
    head_operations,
    layer_operations,
    layer_weights,
    table_weights,
)
from craton.planning.step.sharding import total_size

COLLECTIVES: dict[str, Callable[[float, Group, Network], float]] = {
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_reduce": all_reduce_seconds,
    "all_to_all": all_to_all_seconds,
}

# Kernel launches of a layer's forward pass; backward has about twice as many. Counted from profiles of a Llama block in
# eager PyTorch and compiled, and of a grouped-GEMM MoE block; the profile's launch_seconds scales them.
KERNELS = {"eager": 24, "compiled": 12, "experts": 30, "expert loop": 12}
SCORE_BYTES = 9.0  # fused softmax with mask: read and write; dropout: read, write and a mask


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Seconds of one layer (or of embedding and head) for one micro-batch, forward and backward."""

    gemm: tuple[float, float]
    experts: tuple[float, float]  # grouped matmuls
    attention: tuple[float, float]
    elementwise: tuple[float, float]
    permute: tuple[float, float]
    kernels: tuple[float, float]  # a count
    tensor: tuple[float, float]  # collectives of tensor parallelism
    tensor_sums: float  # share of reduce-scatters in its forward pass
    context: tuple[float, float]
    exchange: tuple[float, float]  # all-to-all of experts
    dispatches: tuple[float, float]  # a count: host synchronisations for the number of tokens per expert
    parameters: float  # on this rank, before FSDP
    expert_parameters: float


def group_of(size: int, stride: int, network: Network) -> Group:
    """Return the ranks of one mesh dimension: `size` ranks, `stride` apart in the global order."""
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
    """Return the terms of one transformer layer on one rank. Only tp, cp, ep, micro_batch and precision matter here.

    `expert_stride`: distance between the ranks of an expert exchange.
    """
    work = layer_operations(shape, layout, sequence, traits, moe=moe)
    weights = layer_weights(shape, layout.tp, layout.ep, moe=moe)
    tp, hidden = layout.tp, shape.hidden
    tokens = layout.micro_batch * sequence / layout.cp
    gemm = _sum(linear_seconds(product, layout.precision, gpu, lora) for product in work.products)
    gemm = (gemm[0], gemm[1] + sum(linear_seconds(product, layout.precision, gpu, lora)[0] for product in work.again))
    experts = _sum(expert_seconds(product, layout.precision, gpu, traits, imbalance, lora) for product in work.experts)
    rate = gpu.elementwise_bytes_per_second
    kernels = float(KERNELS["compiled" if traits.compiled else "eager"])
    activations = sum(product.rows * (product.n + product.k) for product in work.projections)
    permute, ffn_elements = (0.0, 0.0), 0.0
    if moe:
        up, down = work.experts
        rows = up.rows * up.groups
        # permute and un-permute: each assignment is read and written once before and once after its expert
        permute_bytes = 2.0 * (4.0 * rows * hidden + rows * (up.n + down.k))
        permute = (permute_bytes / rate, 1.5 * permute_bytes / rate)
        kernels += KERNELS["experts"] if traits.dispatcher != "loop" else KERNELS["expert loop"] * up.groups
        activations += rows * (hidden + up.n)
    else:
        up, down = work.mlp
        ffn_elements = tokens * (up.n + down.k)
        activations += tokens * (hidden + up.n)

    query_dim = work.attention[0][0].query_dim
    heads_width = (shape.heads + shape.kv_heads) * query_dim / tp
    elements = 10.0 * tokens * hidden / tp + 2.0 * tokens * heads_width + ffn_elements
    low = layout.precision not in ("bf16", "fp16", "fp32")  # then inputs and outputs of matmuls are quantized
    traffic = OUTPUT_BYTES[layout.precision] * elements + (3.0 * activations if low else 0.0)
    scores = 0.0 if traits.attention != "unfused" else SCORE_BYTES * tokens * sequence * shape.heads / tp
    elementwise = ((traffic + scores) / rate, (2.0 * traffic + 1.5 * scores) / rate)

    groups = {
        "tp": group_of(tp, 1, network),
        "cp": group_of(layout.cp, tp, network),
        "cp·tp": group_of(layout.cp * tp, 1, network),
        "ep": group_of(layout.ep, expert_stride, network),
    }
    copies = (
        distinct_copies_share(shape.top_k, groups["ep"]) if moe and traits.dispatcher in ("deepep", "hybridep") else 1.0
    )

    def seconds(*dimensions: Dimension, scale: float = 1.0) -> tuple[float, float]:
        def of(transfers: tuple[Transfer, ...]) -> float:
            chosen = [transfer for transfer in transfers if transfer.dimension in dimensions]
            return sum(transfer_seconds(item, groups[item.dimension], network, scale) for item in chosen)

        return of(work.forward), of(work.backward)

    tensor = seconds("tp")
    scattered = sum(
        transfer_seconds(item, groups["tp"], network)
        for item in work.forward
        if item.dimension == "tp" and item.operation == "reduce_scatter"
    )
    return LayerTerms(
        gemm=gemm,
        experts=experts,
        attention=_attention(work, layout.precision, gpu, traits),
        elementwise=elementwise,
        permute=permute,
        kernels=(kernels, 2.0 * kernels),
        tensor=tensor,
        tensor_sums=scattered / tensor[0] if tensor[0] else 0.0,
        context=seconds("cp", "cp·tp"),
        exchange=seconds("ep", scale=copies),
        dispatches=(1.0, 1.0) if moe else (0.0, 0.0),
        parameters=total_size(weights, experts=False),
        expert_parameters=total_size(weights, experts=True),
    )


def head_terms(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    gpu: GpuRates,
    network: Network,
    traits: Traits,
    *,
    lora: bool = False,
) -> LayerTerms:
    """Return the terms of embedding, final projection and cross-entropy; in a pipeline of the last stage, which has no
    embedding. Always in 16 bit, whatever the layers use."""
    alone = layout.pp == 1
    work = head_operations(shape, layout, sequence, traits, embeds=alone)
    tokens = layout.micro_batch * sequence / layout.cp
    width = shape.vocab / layout.tp
    precision = "fp32" if layout.precision == "fp32" else "bf16"
    rate = gpu.elementwise_bytes_per_second
    logits = tokens * width * OUTPUT_BYTES[precision] / 2.0
    group = group_of(layout.tp, 1, network)
    zero = (0.0, 0.0)
    return LayerTerms(
        gemm=_sum(linear_seconds(product, precision, gpu, lora) for product in work.products),
        experts=zero,
        attention=zero,
        # logits written, read and upcast by the softmax, its gradient written and read again: bytes at 16 bit. Craton's
        # kernel reads them twice and writes the gradient in their place.
        elementwise=(logits * 6.0 / rate, 0.0) if traits.own_layers else (logits * 10.0 / rate, logits * 8.0 / rate),
        permute=zero,
        kernels=(8.0, 10.0),
        tensor=(
            sum(transfer_seconds(entry, group, network) for entry in work.forward),
            sum(transfer_seconds(item, group, network) for item in work.backward),
        ),
        tensor_sums=0.0,
        context=zero,
        exchange=zero,
        dispatches=zero,
        parameters=total_size(table_weights(shape, layout.tp, embeds=alone, predicts=True), experts=False),
        expert_parameters=0.0,
    )


def transfer_seconds(transfer: Transfer, group: Group, network: Network, scale: float = 1.0) -> float:
    """Return the time of all calls of one transfer; `scale`: the share of its bytes that is sent."""
    return transfer.count * COLLECTIVES[transfer.operation](scale * transfer.size_bytes, group, network)


def distinct_copies_share(top_k: int, group: Group) -> float:
    """Return the copies of a token that leave a rank, over one copy per expert: one per node, inside a domain one per
    rank. The expected number of distinct places of `top_k` experts among n is n · (1 - (1 - 1/n)^top_k)."""
    domains = -(-group.size // group.per_domain)
    places = domains if domains > 1 else group.size
    return min(1.0, places * (1.0 - (1.0 - 1.0 / places) ** top_k) / top_k)


def linear_seconds(product: Product, precision: str, gpu: GpuRates, lora: bool) -> tuple[float, float]:
    """Return forward and backward time: gradients of input and weight at their own shapes; none for frozen weights."""
    rows, n, k = product.rows, product.n, product.k
    forward = gemm_seconds(rows, n, k, precision, gpu)
    backward = gemm_seconds(rows, k, n, precision, gpu)
    if not lora:
        backward += gemm_seconds(n, k, rows, precision, gpu)
    return forward, backward


def expert_seconds(
    product: Product, precision: str, gpu: GpuRates, traits: Traits, imbalance: float, lora: bool
) -> tuple[float, float]:
    rows, n, k, experts = product.rows, product.n, product.k, product.groups
    if traits.dispatcher == "loop":
        forward, backward = linear_seconds(Product(rows * imbalance, n, k), precision, gpu, lora)
        return experts * forward, experts * backward
    forward = grouped_gemm_seconds(rows, n, k, experts, precision, gpu, imbalance)
    backward = grouped_gemm_seconds(rows, k, n, experts, precision, gpu, imbalance)
    if not lora:
        backward += grouped_gemm_seconds(n, k, rows, experts, precision, gpu, imbalance)
    return forward, backward


def _attention(work: Operations, precision: str, gpu: GpuRates, traits: Traits) -> tuple[float, float]:
    whole = work.attention[0][0]
    if traits.attention == "unfused":
        unit = precision if precision in ("fp32", "fp16", "bf16") else "bf16"
        count = whole.batch * whole.heads
        product = gemm_seconds(whole.queries, whole.keys, whole.query_dim, unit, gpu, count)
        product += gemm_seconds(whole.queries, whole.value_dim, whole.keys, unit, gpu, count)
        return (product, 2.0 * product)
    kernel: Literal["best", "flash2"] = "flash2" if traits.attention == "flash2" else "best"

    def seconds(call: AttentionCall, backward: bool) -> float:
        return attention_seconds(
            call.batch,
            call.queries,
            call.keys,
            call.heads,
            call.kv_heads,
            call.query_dim,
            gpu,
            causal=call.causal,
            backward=backward,
            value_dim=call.value_dim,
            precision="fp32" if precision == "fp32" else "bf16",
            kernel=kernel,
        )

    full = (seconds(whole, False), seconds(whole, True))
    # a window longer than half the sequence saves nothing
    parts = [
        (share * min(seconds(call, False), full[0]), share * min(seconds(call, True), full[1]))
        for call, share in work.attention
    ]
    return _sum(parts)


def _sum(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    forward = backward = 0.0
    for f, b in pairs:
        forward, backward = forward + f, backward + b
    return forward, backward
