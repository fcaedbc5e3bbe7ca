"""One training step: what its operators and collectives cost (`step_terms`), and how a software stack composes them
(`compose`).

The terms need no software constant and the composition needs no shape, so a fit evaluates the first once per run and
the second thousands of times, and a search shares terms between layouts. All parts are exposed seconds and add up to
`step_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.job import Layout, ModelShape, Weights
from craton.planning.collectives import (
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from craton.planning.compute import LayerTerms, group_of, head_terms, layer_terms
from craton.planning.kernels import OUTPUT_BYTES, GpuRates
from craton.planning.software import INDEX, Traits

Array = NDArray[np.float64]

# Bytes a parameter that Adam reads and writes: master and two moments in fp32, on top of which come the gradient and,
# where there is one, the 16-bit weight; with weights and states in bf16 four values read and three written.
MASTER_OPTIMIZER_BYTES = 24.0
BF16_OPTIMIZER_BYTES = 14.0
# Offload, where nothing was measured: what an optimizer on the host's CPUs streams for one GPU (an eighth of two
# sockets), bytes a token and hidden unit that a layer saves (arXiv:2205.05198 without scores), and PCIe 4.
HOST_OPTIMIZER_BYTES_PER_SECOND = 25e9
SAVED_BYTES = 34.0
DEFAULT_HOST_LINK = 25e9
REAL_IMBALANCE = 1.1  # busiest expert over the mean with a trained router (assumed); published runs force balance
EARLY_BACKWARD = 0.85  # share of the last backward pass behind which gradients can be reduced
OVERLAP_SHARPNESS = 4.0
ZERO_BUBBLE = 1 / 3  # zero-bubble schedules keep about a third of the 1F1B bubble (arXiv:2401.10241)
# (share of the forward pass repeated, share of attention repeated) by `recompute`, "selective" by the stack's trait
RECOMPUTED: dict[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "full": (1.0, 1.0),
    "attention": (0.0, 1.0),
    "operators": (0.5, 0.0),
    "every second layer": (0.5, 0.5),
    "modules": (0.08, 0.0),  # norms, activations, up-projections
}
LORA_SHARE = 0.005  # trainable share of a model with rank-16 adapters


@dataclass(frozen=True)
class Workload:
    """What one step must do, and how it is laid out."""

    shape: ModelShape
    layout: Layout
    sequence: int
    global_batch_sequences: int
    lora: bool = False
    imbalance: float = 1.0  # busiest expert over the mean
    weights: Weights = "fp32"  # bf16: no fp32 master weights, states in bf16
    adjacent_experts: bool = False  # expert ranks next to each other, as published runs place them, not tp apart
    on_cpu: bool = False

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch_sequences // (self.layout.data_parallel * self.layout.micro_batch))

    @property
    def tokens(self) -> int:
        return self.global_batch_sequences * self.sequence


@dataclass(frozen=True, slots=True)
class StepTerms:
    """Everything of one step that does not depend on software constants. Per micro-batch where not said otherwise."""

    layer: LayerTerms  # the mean layer of the model
    head: LayerTerms
    num_layers: float  # multi-token-prediction layers included
    num_heads: float  # head passes: 1, and one more per multi-token-prediction layer
    full_layers: float  # layers of the fullest pipeline rank
    full_heads: float
    pp: int
    vpp: int
    micro_batches: float
    bubble_factor: float
    send_seconds: float  # one activation to the next stage
    sends: float  # exposed sends a micro-batch
    fsdp_passes: tuple[float, float, float]  # gathers forward, gathers backward, scatters: per micro-batch
    layer_shard: tuple[float, float]  # FSDP: all-gather of a layer's weights, reduce-scatter of its gradients, once
    head_shard: tuple[float, float]
    once_gather_seconds: float  # per step: parameters after a sharded optimizer step
    once_reduce_seconds: float  # per step: gradients
    optimizer_seconds: float  # least traffic
    offload_once_seconds: float  # per step: gradients to the host, its optimizer, weights back
    offload_layer_seconds: float  # one layer's activations to the host, or back
    gemm_index: int  # which efficiency the layer products use
    recompute: float  # share of the forward pass repeated
    recompute_attention: float  # share of attention repeated
    gradient_overlap: float  # 1 or 0
    overlap: float  # 0 where the cores that compute also communicate: nothing is hidden
    tensor_far: float  # 1: the group leaves its NVLink domain
    context_far: float
    exchange_far: float
    shard_far: float
    nodes_log2: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Exposed seconds of one step."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    permute: float
    dispatch: float
    head: float
    recompute: float
    host: float
    tensor: float
    context: float
    exchange: float
    shard: float
    gradients: float
    bubble: float
    send: float
    offload: float
    straggle: float
    optimizer: float
    overhead: float
    hidden: float  # communication behind compute: not part of the step

    @property
    def step_seconds(self) -> float:
        return (
            self.gemm
            + self.experts
            + self.attention
            + self.elementwise
            + self.permute
            + self.dispatch
            + self.head
            + self.recompute
            + self.host
            + self.tensor
            + self.context
            + self.exchange
            + self.shard
            + self.gradients
            + self.bubble
            + self.send
            + self.offload
            + self.straggle
            + self.optimizer
            + self.overhead
        )


PARTS: tuple[str, ...] = tuple(field.name for field in fields(StepTimes) if field.name != "hidden")

_GEMM_CONSTANT = {
    "fp32": INDEX["gemm_efficiency"],
    "fp16": INDEX["gemm_efficiency"],
    "bf16": INDEX["gemm_efficiency"],
    "fp8": INDEX["fp8_efficiency"],
    "mxfp8": INDEX["mxfp8_efficiency"],
    "nvfp4": INDEX["fp4_efficiency"],
}


class StepModel:
    """The steps of one job on one machine: what layouts share is evaluated once."""

    def __init__(
        self,
        shape: ModelShape,
        sequence: int,
        global_batch_sequences: int,
        gpu: GpuRates,
        network: Network,
        traits: Traits,
        lora: bool = False,
        imbalance: float = 1.0,
        host_link_bytes_per_second: float = DEFAULT_HOST_LINK,
        weights: Weights = "fp32",
        adjacent_experts: bool = False,
    ) -> None:
        self.shape, self.sequence, self.global_batch_sequences = shape, sequence, global_batch_sequences
        self.gpu, self.network, self.traits, self.lora, self.imbalance = gpu, network, traits, lora, imbalance
        self.host_link_bytes_per_second = host_link_bytes_per_second
        self.weights, self.adjacent_experts = weights, adjacent_experts
        self._operators: dict[tuple[int, int, int, int, str], tuple[LayerTerms, LayerTerms]] = {}
        self._transfers: dict[tuple[int, ...], tuple[tuple[float, float], ...]] = {}

    def workload(self, layout: Layout) -> Workload:
        """What memory is counted for."""
        return Workload(
            self.shape,
            layout,
            self.sequence,
            self.global_batch_sequences,
            self.lora,
            self.imbalance,
            self.weights,
            self.adjacent_experts,
            self.gpu.generation == "cpu",
        )

    def terms(self, layout: Layout) -> StepTerms:
        """Evaluate operators and collectives of one step."""
        shape, network, traits = self.shape, self.network, self.traits
        layer, head = self._operators_of(layout)
        pp, vpp = layout.pp, max(1, layout.vpp)
        micro_batches = max(1, self.global_batch_sequences // (layout.data_parallel * layout.micro_batch))
        num_layers = float(shape.layers + shape.mtp_layers)
        num_heads = 1.0 + shape.mtp_layers
        full_layers, full_heads = fullest_rank(num_layers, num_heads, pp, vpp)
        send = 0.0
        if pp > 1:
            size = 2.0 * layout.micro_batch * self.sequence / layout.cp * shape.hidden / layout.tp
            send = point_to_point_seconds(size, layout.world // pp < network.nvlink_domain, network)

        parameters = num_layers * layer.parameters / pp + head.parameters
        expert_parameters = num_layers * layer.expert_parameters / pp
        passes = (0.0, 0.0, 0.0)
        if layout.fsdp > 1 and layout.zero > 1:
            if pp > 1:  # weights stay gathered between the micro-batches of a pipeline
                passes = (1.0 / micro_batches, 0.0, 1.0 / micro_batches)
            else:
                passes = (1.0, 1.0 if layout.zero == 3 else 0.0, 1.0)
        wide = layout.precision == "fp32"
        key = (pp, layout.replicate, layout.fsdp, layout.cp, layout.tp, layout.ep, layout.zero, wide)
        if key not in self._transfers:
            layer_shard = head_shard = (0.0, 0.0)
            if passes[0]:
                layer_shard = self._shard_seconds(layer.parameters, layer.expert_parameters, layout)
                head_shard = self._shard_seconds(head.parameters, 0.0, layout)
            once = self._once_per_step(parameters, expert_parameters, layout)
            self._transfers[key] = (layer_shard, head_shard, once)
        layer_shard, head_shard, (once_gather, once_reduce) = self._transfers[key]
        ranks = layout.fsdp * layout.cp  # context-parallel ranks share the optimizer too
        expert_ranks = max(1, ranks * layout.tp // layout.ep) if ranks > 1 else 1
        local = parameters / ranks + expert_parameters / expert_ranks
        trained = local * (LORA_SHARE if self.lora else 1.0)
        optimizer_seconds, offload_once, offload_layer = self._optimizer_and_offload(trained, layout)
        recompute, recompute_attention = RECOMPUTED[
            layout.recompute if layout.recompute != "selective" else traits.selective
        ]
        domain = network.nvlink_domain
        return StepTerms(
            layer=layer,
            head=head,
            num_layers=num_layers,
            num_heads=num_heads,
            full_layers=float(full_layers),
            full_heads=float(full_heads),
            pp=pp,
            vpp=vpp,
            micro_batches=float(micro_batches),
            bubble_factor=ZERO_BUBBLE if layout.schedule == "zero-bubble" else 1.0,
            send_seconds=send,
            sends=0.0 if pp == 1 else float(vpp) if vpp > 1 else 2.0,  # interleaving hides half of its 2 · vpp sends
            fsdp_passes=passes,
            layer_shard=layer_shard,
            head_shard=head_shard,
            once_gather_seconds=once_gather,
            once_reduce_seconds=once_reduce,
            optimizer_seconds=optimizer_seconds,
            offload_once_seconds=offload_once,
            offload_layer_seconds=offload_layer,
            gemm_index=_GEMM_CONSTANT[layout.precision],
            recompute=recompute,
            recompute_attention=recompute_attention,
            gradient_overlap=float(traits.gradient_overlap),
            overlap=0.0 if self.gpu.generation == "cpu" else 1.0,
            tensor_far=float(layout.tp > domain),
            context_far=float(layout.tp * layout.cp > domain),
            exchange_far=float(layout.ep * self._expert_stride(layout) > domain),
            shard_far=float(layout.tp * layout.cp * layout.data_parallel > domain),
            nodes_log2=math.log2(max(1.0, layout.world / network.node_gpus)),
        )

    def _operators_of(self, layout: Layout) -> tuple[LayerTerms, LayerTerms]:
        """(mean layer, head): the same for all layouts that split the operators alike."""
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.precision)
        if key not in self._operators:
            shape = self.shape
            moe_layers = shape.moe_layers + (shape.mtp_layers if shape.is_moe else 0)
            dense_layers = shape.layers + shape.mtp_layers - moe_layers
            kinds = [
                (
                    layer_terms(
                        shape,
                        layout,
                        self.sequence,
                        self.gpu,
                        self.network,
                        self.traits,
                        moe=moe,
                        lora=self.lora,
                        imbalance=self.imbalance,
                        expert_stride=self._expert_stride(layout),
                    ),
                    count,
                )
                for moe, count in ((False, dense_layers), (True, moe_layers))
                if count
            ]
            head = head_terms(shape, layout, self.sequence, self.gpu, self.network, lora=self.lora)
            self._operators[key] = (_mean(kinds), head)
        return self._operators[key]

    def _shard_seconds(self, parameters: float, expert_parameters: float, layout: Layout) -> tuple[float, float]:
        """FSDP's all-gather of weights and reduce-scatter of gradients; experts shard over what ep leaves."""
        network, value, width = self.network, OUTPUT_BYTES[layout.precision], self._gradient_bytes(layout)
        ranks = layout.fsdp * layout.cp
        group = group_of(ranks, layout.tp, network)
        gather = all_gather_seconds(value * parameters, group, network)
        scatter = reduce_scatter_seconds(width * parameters, group, network)
        if expert_parameters:
            group = self._expert_group(max(1, ranks * layout.tp // layout.ep), layout)
            gather += all_gather_seconds(value * expert_parameters, group, network)
            scatter += reduce_scatter_seconds(width * expert_parameters, group, network)
        return gather, 0.0 if self.lora else scatter

    def _once_per_step(self, parameters: float, expert_parameters: float, layout: Layout) -> tuple[float, float]:
        """(gather of parameters, reduction of gradients) that happen once a step: DDP, a sharded optimizer, HSDP."""
        network = self.network
        share = LORA_SHARE if self.lora else 1.0
        gather = reduce = 0.0
        if layout.fsdp > 1 and layout.zero == 1:
            gather, reduce = self._shard_seconds(share * parameters, share * expert_parameters, layout)
        if layout.replicate > 1 or (layout.fsdp == 1 and layout.cp > 1):
            width = share * self._gradient_bytes(layout)
            shards = layout.fsdp * layout.cp if layout.fsdp > 1 else 1
            copies = layout.replicate * layout.cp if shards == 1 else layout.replicate
            group = group_of(copies, layout.tp * shards, network)
            reduce += all_reduce_seconds(width * parameters / shards, group, network)
            # An expert is on every ep-th rank; those among the shards hold a piece of it each, the others a copy.
            expert_shards = max(1, shards * layout.tp // layout.ep) if shards > 1 else 1
            copies = max(1, layout.data_parallel * layout.cp * layout.tp // layout.ep) // expert_shards
            group = group_of(copies, layout.tp * shards, network) if shards > 1 else self._expert_group(copies, layout)
            reduce += all_reduce_seconds(width * expert_parameters / expert_shards, group, network)
        return gather, reduce

    def _expert_stride(self, layout: Layout) -> int:
        """How far apart the ranks are that share the experts of a layer."""
        return 1 if self.adjacent_experts else layout.tp

    def _expert_group(self, size: int, layout: Layout) -> Group:
        """Ranks with the same experts: every ep-th, or all of a tensor-parallel group and then every ep-th of those."""
        network = self.network
        if self.adjacent_experts or layout.tp == 1:
            return group_of(size, layout.ep, network)
        tp, span = layout.tp, layout.tp * layout.ep

        def together(ranks: int) -> int:
            return max(1, min(size, tp * max(1, ranks // span), ranks))

        spans = bool(network.leaf_gpus) and size * layout.ep > network.leaf_gpus
        concurrent = min(layout.ep, network.node_gpus)
        return Group(size, together(network.nvlink_domain), together(network.node_gpus), spans, concurrent)

    def _optimizer_and_offload(self, trained: float, layout: Layout) -> tuple[float, float, float]:
        """(optimizer on the device, optimizer through the host, one layer's activations to the host)"""
        link = self.host_link_bytes_per_second
        if layout.offload == "optimizer":
            moved = (self._gradient_bytes(layout) + OUTPUT_BYTES[layout.precision]) * trained / link
            return 0.0, moved + self._optimizer_bytes(layout) * trained / HOST_OPTIMIZER_BYTES_PER_SECOND, 0.0
        tokens = layout.micro_batch * self.sequence / layout.cp
        saved = SAVED_BYTES * tokens * self.shape.hidden / layout.tp if layout.offload == "activations" else 0.0
        return self._optimizer_bytes(layout) * trained / self.gpu.streaming_bytes_per_second, 0.0, saved / link

    def _gradient_bytes(self, layout: Layout) -> float:
        return 4.0 if self.traits.master_gradients or layout.precision == "fp32" else 2.0

    def _optimizer_bytes(self, layout: Layout) -> float:
        if self.weights == "bf16":
            return BF16_OPTIMIZER_BYTES
        copy = 0.0 if layout.precision == "fp32" else 2.0  # the narrow weight that is written too
        return MASTER_OPTIMIZER_BYTES + copy + self._gradient_bytes(layout)


def evaluation_terms(terms: StepTerms, layout: Layout, sequences: int) -> StepTerms:
    """The forward pass of `sequences` alone, laid out as a step is: what an evaluation costs."""

    def forward(layer: LayerTerms) -> LayerTerms:
        both: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields(layer)}
        forwards: dict[str, Any] = {name: (pair[0], 0.0) for name, pair in both.items() if isinstance(pair, tuple)}
        return replace(layer, **forwards)

    gathers = terms.fsdp_passes[0]
    return replace(
        terms,
        layer=forward(terms.layer),
        head=forward(terms.head),
        micro_batches=float(max(1, -(-sequences // (layout.data_parallel * layout.micro_batch)))),
        fsdp_passes=(gathers, 0.0, 0.0),
        once_gather_seconds=0.0,
        once_reduce_seconds=0.0,
        optimizer_seconds=0.0,
        offload_once_seconds=0.0,
        recompute=0.0,
        recompute_attention=0.0,
    )


def step_terms(work: Workload, gpu: GpuRates, network: Network, traits: Traits) -> StepTerms:
    """Operators and collectives of a single step."""
    model = StepModel(
        work.shape,
        work.sequence,
        work.global_batch_sequences,
        gpu,
        network,
        traits,
        work.lora,
        work.imbalance,
        weights=work.weights,
        adjacent_experts=work.adjacent_experts,
    )
    return model.terms(work.layout)


def fullest_rank(num_layers: float, num_heads: float, pp: int, vpp: int) -> tuple[float, float]:
    """(layers, heads) of the pipeline rank with the most layers.

    Layers that divide evenly leave the head on top of the last rank's share; otherwise stages are uneven and the rank
    with the head gets fewer layers. `compose` takes an even share of everything where that is more.
    """
    if pp == 1:
        return num_layers, num_heads
    per_rank = min(math.ceil(num_layers / (pp * vpp)) * vpp, num_layers)
    return per_rank, num_heads if num_layers % (pp * vpp) == 0 else 0.0


def compose(terms: StepTerms, constants: Array) -> StepTimes:
    """Exposed seconds of a step, given the constants of a software profile in the order of `software.NAMES`.

    Works for one step (constants: [constants]) and for many at once (`stack`ed terms; constants: [constants] or
    [constants, steps]): a search and a fit evaluate thousands of steps in one call.
    """
    (
        gemm_efficiency,
        _fp8,
        _mxfp8,
        _fp4,
        expert_efficiency,
        attention_efficiency,
        elementwise_passes,
        launch_seconds,
        tensor_exposed,
        contention,
        network_slowdown,
        nvlink_slowdown,
        expert_exposed,
        permute_passes,
        dispatch_seconds,
        recompute_cost,
        bubble_constant,
        optimizer_passes,
        overhead,
        straggle,
    ) = constants
    linear = (
        constants[terms.gemm_index]
        if constants.ndim == 1
        else np.take_along_axis(constants, np.reshape(terms.gemm_index, (1, -1)), axis=0)[0]
    )
    layer, head = terms.layer, terms.head
    count = terms.micro_batches

    def slowdown(far: float) -> Any:
        return nvlink_slowdown + far * (network_slowdown - nvlink_slowdown)

    gemm_f, gemm_b = layer.gemm[0] / linear, layer.gemm[1] / linear
    expert_f = layer.experts[0] / (linear * expert_efficiency)
    expert_b = layer.experts[1] / (linear * expert_efficiency)
    attention_f = layer.attention[0] / attention_efficiency
    attention_b = layer.attention[1] / attention_efficiency
    element_f = layer.elementwise[0] * elementwise_passes
    element_b = layer.elementwise[1] * elementwise_passes
    permute_f, permute_b = layer.permute[0] * permute_passes, layer.permute[1] * permute_passes
    host_f, host_b = layer.kernels[0] * launch_seconds, layer.kernels[1] * launch_seconds
    dispatch_f, dispatch_b = layer.dispatches[0] * dispatch_seconds, layer.dispatches[1] * dispatch_seconds

    tensor_scale = tensor_exposed * slowdown(terms.tensor_far)
    tensor_f, tensor_b = layer.tensor[0] * tensor_scale, layer.tensor[1] * tensor_scale
    context_scale = slowdown(terms.context_far)
    ring_f, ring_b = layer.context[0] * context_scale, layer.context[1] * context_scale
    covered_f, covered_b = _covered(ring_f, attention_f), _covered(ring_b, attention_b)
    context_f = ring_f - covered_f + contention * covered_f
    context_b = ring_b - covered_b + contention * covered_b
    exchange_scale = expert_exposed * slowdown(terms.exchange_far)
    exchange_f, exchange_b = layer.exchange[0] * exchange_scale, layer.exchange[1] * exchange_scale

    again_f = gemm_f + expert_f + element_f + permute_f + host_f + dispatch_f + tensor_f + exchange_f
    again = recompute_cost * (terms.recompute * again_f + terms.recompute_attention * attention_f)

    head_f = head.gemm[0] / gemm_efficiency + head.elementwise[0] * elementwise_passes + head.tensor[0] * tensor_scale
    head_b = head.gemm[1] / gemm_efficiency + head.elementwise[1] * elementwise_passes + head.tensor[1] * tensor_scale

    layer_f = gemm_f + expert_f + attention_f + element_f + permute_f + host_f + dispatch_f
    layer_f = layer_f + tensor_f + context_f + exchange_f
    layer_b = gemm_b + expert_b + attention_b + element_b + permute_b + host_b + dispatch_b
    layer_b = layer_b + tensor_b + context_b + exchange_b + again

    mean = (terms.num_layers * (layer_f + layer_b) + terms.num_heads * (head_f + head_b)) / terms.pp

    def rank(layers: Any, heads: Any) -> StepTimes:
        """The step, if all wait for a pipeline rank with these layers and heads."""
        # What already hides a ring cannot hide anything else, so that a faster card never makes a step slower.
        window_f = layers * (layer_f - covered_f) + heads * head_f
        window_b = layers * (layer_b - covered_b) + heads * head_b

        # Sharded weights: gathers run ahead of the layer that needs them, reductions behind; the first is not hidden.
        shard_scale = slowdown(terms.shard_far)
        gathers_f, gathers_b, scatters = terms.fsdp_passes
        gather = shard_scale * (layers * terms.layer_shard[0] + heads * terms.head_shard[0])
        scatter = shard_scale * (layers * terms.layer_shard[1] + heads * terms.head_shard[1])
        wire_f, wire_b = gathers_f * gather, gathers_b * gather + scatters * scatter
        hidden_f, hidden_b = terms.overlap * _covered(wire_f, window_f), terms.overlap * _covered(wire_b, window_b)
        edge = shard_scale * (gathers_f * terms.head_shard[0] + scatters * terms.layer_shard[1])
        shard = wire_f + wire_b - (1.0 - contention) * (hidden_f + hidden_b)
        shard = shard + terms.overlap * _covered(edge, 0.5 * (wire_f + wire_b))

        # One reduction and one gather a step, behind the last backward and the first forward pass.
        once_gather = terms.once_gather_seconds * shard_scale
        once_reduce = terms.once_reduce_seconds * shard_scale
        early_f = terms.overlap * terms.gradient_overlap * _covered(once_gather, window_f - hidden_f)
        early_b = terms.overlap * terms.gradient_overlap * _covered(once_reduce, EARLY_BACKWARD * (window_b - hidden_b))
        covered = early_f + early_b
        gradients = once_gather + once_reduce - (1.0 - contention) * covered

        bubble = bubble_constant * terms.bubble_factor * (terms.pp - 1) / terms.vpp * mean
        send = terms.sends * terms.send_seconds * network_slowdown * (count + terms.pp - 1)

        away = layers * terms.offload_layer_seconds
        behind = _covered(away, window_f - hidden_f - early_f) + _covered(away, window_b - hidden_b - early_b)
        offload = count * (2.0 * away - (1.0 - contention) * behind) + terms.offload_once_seconds

        repeat = count * layers
        optimizer = terms.optimizer_seconds * optimizer_passes
        base = repeat * (layer_f + layer_b) + count * (heads * (head_f + head_b) + shard)
        base = base + gradients + bubble + send + offload + optimizer + overhead
        return StepTimes(
            gemm=repeat * (gemm_f + gemm_b),
            experts=repeat * (expert_f + expert_b),
            attention=repeat * (attention_f + attention_b),
            elementwise=repeat * (element_f + element_b),
            permute=repeat * (permute_f + permute_b),
            dispatch=repeat * (dispatch_f + dispatch_b),
            head=count * heads * (head_f + head_b),
            recompute=repeat * again,
            host=repeat * (host_f + host_b),
            tensor=repeat * (tensor_f + tensor_b),
            context=repeat * (context_f + context_b),
            exchange=repeat * (exchange_f + exchange_b),
            shard=count * shard,
            gradients=gradients,
            bubble=bubble,
            send=send,
            offload=offload,
            straggle=base * straggle * terms.nodes_log2,
            optimizer=optimizer,
            overhead=overhead + 0.0 * base,
            hidden=count * (hidden_f + hidden_b) + covered,
        )

    # The others wait for the fullest rank, or for an even share of layers and heads where that takes longer.
    full = rank(terms.full_layers, terms.full_heads)
    if np.max(terms.pp) == 1:
        return full
    even = rank(terms.num_layers / terms.pp, terms.num_heads / terms.pp)
    is_full = full.step_seconds >= even.step_seconds
    return StepTimes(
        **{
            field.name: np.where(is_full, getattr(full, field.name), getattr(even, field.name))[()]
            for field in fields(StepTimes)
        }
    )


def stack(steps: Sequence[StepTerms]) -> StepTerms:
    """Many steps as one object whose fields are arrays, for `compose`."""
    columns: dict[str, Any] = {}
    for field in fields(StepTerms):
        values = [getattr(step, field.name) for step in steps]
        columns[field.name] = _stack_layers(values) if isinstance(values[0], LayerTerms) else _column(values)
    return StepTerms(**columns)


def _stack_layers(layers: list[LayerTerms]) -> LayerTerms:
    """Layouts that split operators alike share one object, so only the different ones are converted."""
    different = {id(layer): layer for layer in layers}
    position = {key: index for index, key in enumerate(different)}
    index = np.array([position[id(layer)] for layer in layers])
    return LayerTerms(
        **{
            field.name: _column([getattr(layer, field.name) for layer in different.values()])[..., index]
            for field in fields(LayerTerms)
        }
    )


def _column(values: list[Any]) -> Any:
    return np.array(values, dtype=np.int64 if isinstance(values[0], int) else np.float64).T


def _covered(wire: Any, compute: Any) -> Any:
    """The part of a transfer that its compute can hide: the smaller of both, rounded off where they are alike,
    because layers differ and no schedule packs them perfectly."""
    large = np.maximum(np.maximum(wire, compute), 1e-12)
    small = np.minimum(wire, compute)
    return small / (1.0 + (small / large) ** OVERLAP_SHARPNESS) ** (1.0 / OVERLAP_SHARPNESS)


def _mean(kinds: list[tuple[LayerTerms, int]]) -> LayerTerms:
    if len(kinds) == 1:
        return kinds[0][0]
    total = sum(count for _, count in kinds)

    def mean(name: str) -> Any:
        values = [(getattr(terms, name), count / total) for terms, count in kinds]
        if isinstance(values[0][0], tuple):
            return (sum(v[0] * w for v, w in values), sum(v[1] * w for v, w in values))
        return sum(v * w for v, w in values)

    return LayerTerms(**{field.name: mean(field.name) for field in fields(LayerTerms)})
