"""One training step: what its operators and collectives cost, before any software constant (`StepModel.terms`).

How a stack composes them to seconds is `composition`. A search shares terms between layouts that split operators alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from craton.job import Layout, ModelShape, Weights
from craton.planning.collectives import (
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from craton.planning.composition import StepTerms
from craton.planning.compute import LayerTerms, group_of, head_terms, layer_terms
from craton.planning.kernels import OUTPUT_BYTES, GpuRates
from craton.planning.software import INDEX, Traits

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
_GEMM_CONSTANT = {
    "fp32": INDEX["gemm_efficiency"],
    "fp16": INDEX["gemm_efficiency"],
    "bf16": INDEX["gemm_efficiency"],
    "fp8": INDEX["fp8_efficiency"],
    "mxfp8": INDEX["mxfp8_efficiency"],
    "nvfp4": INDEX["fp4_efficiency"],
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
