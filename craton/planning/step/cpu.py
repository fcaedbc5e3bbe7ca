"""One layer, the ends of the model and the rest of a step on a CPU, where operations are issued and run by one thread.

A small model on a CPU spends most of its step outside of matmuls: in operations (their number times the measured cost
of one), in collectives (as often as FSDP2 and tensor parallelism call them), in the optimizer's tensors and in the
loop. Numbers of operations were counted with a TorchDispatchMode around `batch_loss` and `backward`, torch 2.13.0.
`compose` adds everything with the constants of the CPU's profile (`calibration.cpu_profile`), most of them 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.rates import (
    OUTPUT_BYTES,
    GpuRates,
    cpu_attention_seconds,
    cpu_exponential_seconds,
    cpu_matmul_seconds,
    cpu_of,
    cpu_pass_seconds,
)
from craton.planning.software import Traits
from craton.planning.step.adapters import adapter_operations, adapter_weights
from craton.planning.step.composition import StepTerms
from craton.planning.step.compute import LayerTerms
from craton.planning.step.operations import (
    Product,
    Repeated,
    head_operations,
    layer_operations,
    layer_weights,
    table_weights,
)
from craton.planning.step.sharding import expert_shards_of, shards_of


class Calls(NamedTuple):
    """Operations of a forward pass and of its backward pass."""

    forward: float
    backward: float

    def plus(self, other: Calls, times: float = 1.0) -> Calls:
        return Calls(self.forward + times * other.forward, self.backward + times * other.backward)


LAYER = Calls(95, 126)  # a dense layer with attention
GROUPED_QUERIES = Calls(9, 6)  # key and value heads are repeated for the CPU's kernel
EXPERTS = Calls(28, 30)  # router, permutation and combination, in place of the dense MLP
ADAPTER = Calls(12, 10)
# The following are times in units of an operation, not counts: mostly Python, or loops inside of one operation.
ENDS = Calls(80, 40)  # embedding, rotary tables, documents, last norm, head and loss: 54 and 26 operations
EACH_EXPERT = Calls(20, 14)  # grouped_mm runs one expert after the other
SHARDED_GROUP = Calls(100, 100)  # hooks of FSDP2 around a layer or the ends, without their collectives
TENSOR_PARALLEL = Calls(60, 60)  # of a layer: DTensor parameters, functional collectives
SELECTIVE = Calls(240, 0)  # of a layer: every operation passes a Python function that may keep its result
SELECTIVE_AGAIN = Repeated(products=0.0, attention=0.0, elements=0.65, collectives=1.0, sums=0.0)
LOSS_PASSES = 8.0  # reads and writes of a logit: softmax, its gradient, the label
LOSS_EXPONENTIALS = 2.0  # log-softmax and its exponential
TRAFFIC_OF_HIDDEN = 10.0  # elements per token and hidden unit of a layer: two norms and two residuals
FIXED_COLLECTIVES = 2.0  # per step: agreement on the number of labels and on stopping, the loss


def layer_calls(shape: ModelShape, layout: Layout, lora_rank: int, *, moe: bool) -> Calls:
    """Return the operations of one layer for one micro-batch, without recomputation."""
    calls = LAYER
    if shape.kv_heads != shape.heads and shape.mla is None:
        calls = calls.plus(GROUPED_QUERIES)
    if moe:
        calls = calls.plus(EXPERTS).plus(EACH_EXPERT, max(1, shape.experts // layout.ep))
    if lora_rank:
        weights = layer_weights(shape, layout.tp, layout.ep, moe=moe)
        calls = calls.plus(ADAPTER, len(adapter_weights(weights, lora_rank)))
    if layout.world > 1:
        calls = calls.plus(SHARDED_GROUP)
    if layout.tp > 1:
        calls = calls.plus(TENSOR_PARALLEL)
    return calls.plus(SELECTIVE) if layout.recompute == "selective" else calls


def end_calls(layout: Layout) -> Calls:
    """Return the operations of embedding, last norm, head and loss for one micro-batch."""
    return ENDS.plus(SHARDED_GROUP) if layout.world > 1 else ENDS


def num_tensors(shape: ModelShape, layout: Layout, kinds: list[tuple[bool, int]], lora_rank: int) -> float:
    """Return the trained tensors on one rank."""
    count = 0.0
    for moe, layers in kinds:
        weights = layer_weights(shape, layout.tp, layout.ep, moe=moe)
        of_layer = 2 * len(adapter_weights(weights, lora_rank)) if lora_rank else len(weights)
        count += layers * of_layer / layout.pp
    return count + (0 if lora_rank else len(table_weights(shape, layout.tp, embeds=True, predicts=True)))


def step_collectives(layout: Layout, traits: Traits, num_layers: float) -> float:
    """Return the collectives per step that no other term counts: all of one rank's small ones, and gradients that are
    reduced one group after the other, of which `StepModel` counts a single call."""
    if layout.world == 1:
        return 0.0
    groups = num_layers / layout.pp + 1.0
    sharded = shards_of(layout, traits) * expert_shards_of(layout, traits) > 1
    norms = float(sharded) + float(layout.tp > 1) + 2.0 * (layout.pp > 1)
    once = groups - 1.0 if layout.data_parallel * layout.cp > 1 and (not sharded or layout.zero == 1) else 0.0
    return FIXED_COLLECTIVES + norms + once * (2.0 if layout.zero == 1 and sharded else 1.0)


def cpu_layer_terms(
    layer: LayerTerms,
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    gpu: GpuRates,
    traits: Traits,
    *,
    moe: bool,
    lora_rank: int,
    imbalance: float,
) -> LayerTerms:
    """Return the terms of a layer with the seconds of this CPU; transfers and sizes stay those of `layer`."""
    cpu = cpu_of(gpu)
    work = layer_operations(shape, layout, sequence, traits, moe=moe)
    precision = layout.precision
    tokens = layout.micro_batch * sequence / layout.cp
    serial = cpu.serial_slowdown
    gemm = _products(work.products, precision, gpu, trained=not lora_rank)
    if lora_rank:
        adapters = adapter_operations(shape, layout, sequence, traits, lora_rank, moe=moe)
        gemm = _sum((gemm, _products(adapters.products, precision, gpu, trained=True)))
    loads = (Product(item.rows * imbalance, item.n, item.k) for item in work.experts)
    groups = work.experts[0].groups if work.experts else 0.0
    experts = _scaled(_products(loads, precision, gpu, trained=not lora_rank), groups)
    attention = [0.0, 0.0]
    for call, share in work.attention:
        scores = call.batch * call.heads * call.queries * call.keys
        for backward in (False, True):
            attention[backward] += share * cpu_attention_seconds(
                scores, call.query_dim, call.value_dim, precision, gpu, backward=backward
            )
    value = OUTPUT_BYTES[precision]
    heads_width = (shape.heads + shape.kv_heads) * work.attention[0][0].query_dim / layout.tp
    if moe:
        up, down = work.experts
        gated = up.rows * up.groups * down.k
    else:
        gated = tokens * work.mlp[1].k
    elements = TRAFFIC_OF_HIDDEN * tokens * shape.hidden / layout.tp + 2.0 * tokens * heads_width + 3.0 * gated
    traffic = cpu_pass_seconds(value * elements, tokens * shape.hidden, gpu)
    silu = cpu_exponential_seconds(gated, gpu)
    calls = layer_calls(shape, layout, lora_rank, moe=moe)
    return replace(
        layer,
        gemm=gemm,
        experts=experts,
        attention=(attention[0], attention[1]),
        elementwise=(traffic + silu, 2.0 * traffic + silu),
        permute=(layer.permute[0] * serial, layer.permute[1] * serial),
        kernels=(calls.forward, calls.backward * _backward_share(gpu)),
    )


def cpu_head_terms(
    head: LayerTerms, shape: ModelShape, layout: Layout, sequence: int, gpu: GpuRates, traits: Traits, *, lora: bool
) -> LayerTerms:
    """Return the same for the ends of the model. The loss computes its gradients in the forward pass."""
    precision = "fp32" if layout.precision == "fp32" else "bf16"
    work = head_operations(shape, layout, sequence, traits, embeds=layout.pp == 1)
    tokens = layout.micro_batch * sequence / layout.cp
    logits = tokens * shape.vocab / layout.tp
    traffic = cpu_pass_seconds(LOSS_PASSES * OUTPUT_BYTES[precision] * logits, logits, gpu)
    loss = traffic + cpu_exponential_seconds(LOSS_EXPONENTIALS * logits, gpu)
    return replace(
        head,
        gemm=_products(work.products, precision, gpu, trained=not lora),
        elementwise=(loss, 0.0),
        kernels=(end_calls(layout).forward, end_calls(layout).backward * _backward_share(gpu)),
    )


def cpu_step_terms(
    terms: StepTerms, layout: Layout, gpu: GpuRates, traits: Traits, *, tensors: float, collective_seconds: float
) -> StepTerms:
    """Return the terms with collectives, tensors and recomputation that only matter where the host is the device."""
    cpu = cpu_of(gpu)
    serial = cpu.serial_slowdown
    collectives = step_collectives(layout, traits, terms.num_layers) * collective_seconds
    return replace(
        terms,
        once_reduce_seconds=terms.once_reduce_seconds + collectives,
        optimizer_seconds=serial * (terms.optimizer_seconds + tensors * cpu.costs.tensor_seconds),
        repeated=SELECTIVE_AGAIN if layout.recompute == "selective" else terms.repeated,
        head_launches=1.0,
    )


def _products(products: Iterable[Product], precision: str, gpu: GpuRates, *, trained: bool) -> tuple[float, float]:
    forward = backward = 0.0
    for item in products:
        forward += item.groups * cpu_matmul_seconds(item.rows, item.n, item.k, precision, gpu)
        backward += item.groups * cpu_matmul_seconds(item.rows, item.k, item.n, precision, gpu)
        if trained:
            backward += item.groups * cpu_matmul_seconds(item.n, item.k, item.rows, precision, gpu)
    return forward, backward


def _backward_share(gpu: GpuRates) -> float:
    costs = cpu_of(gpu).costs
    return costs.backward_operation_seconds / costs.operation_seconds


def _scaled(pair: tuple[float, float], factor: float) -> tuple[float, float]:
    return pair[0] * factor, pair[1] * factor


def _sum(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*pairs, strict=True)
    return sum(forward), sum(backward)
