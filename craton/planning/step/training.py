"""One training step: times of its operators and collectives, without software constants (`StepModel.terms`).

`composition` turns them into seconds of a stack. A search shares terms between layouts with the same operator split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from craton.job.layout import Layout, stage_layers
from craton.job.model import ModelShape
from craton.job.sections import Weights
from craton.planning.rates import (
    OUTPUT_BYTES,
    GpuRates,
    Group,
    Network,
    all_gather_seconds,
    all_reduce_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from craton.planning.software import INDEX, Traits
from craton.planning.step.adapters import trained_share
from craton.planning.step.composition import StepTerms
from craton.planning.step.compute import LayerTerms, group_of, head_terms, layer_terms
from craton.planning.step.cpu import cpu_head_terms, cpu_layer_terms, cpu_step_terms, num_tensors
from craton.planning.step.host import forward_seconds, host_seconds, launches_eagerly
from craton.planning.step.operations import RECOMPUTED, Weight, boundary_bytes, layer_weights, repeated, table_weights
from craton.planning.step.sharding import (
    copies_of,
    expert_copies_of,
    expert_shards_of,
    gathered_bytes,
    gradient_bytes,
    num_layers,
    padded_partial_size,
    padded_size,
    passes,
    shards_of,
)

# Bytes per parameter that Adam reads and writes: master weight and two moments in fp32, plus the gradient and, if there
# is one, the 16-bit weight; with weights and states in bf16 four values read and three written.
MASTER_OPTIMIZER_BYTES = 24.0
BF16_OPTIMIZER_BYTES = 14.0
# Offload, not measured: optimizer throughput on the host's CPUs per GPU (an eighth of two sockets), saved bytes per
# token and hidden unit of a layer (arXiv:2205.05198 without scores), and PCIe 4.
HOST_OPTIMIZER_BYTES_PER_SECOND = 25e9
SAVED_BYTES = 34.0
DEFAULT_HOST_LINK = 25e9
REAL_IMBALANCE = 1.1  # busiest expert over the mean with a trained router (assumed); published runs force balance
ZERO_BUBBLE = 1 / 3  # zero-bubble schedules keep about a third of the 1F1B bubble (arXiv:2401.10241)
_GEMM_CONSTANT = {
    "fp32": INDEX["gemm_efficiency"],
    "fp16": INDEX["gemm_efficiency"],
    "bf16": INDEX["gemm_efficiency"],
    "fp8": INDEX["fp8_efficiency"],
    "mxfp8": INDEX["mxfp8_efficiency"],
    "nvfp4": INDEX["fp4_efficiency"],
}
DEFAULT_LORA_RANK = 16  # of published runs, which leave it open


@dataclass(frozen=True)
class Workload:
    """The work of one step and its layout."""

    shape: ModelShape
    layout: Layout
    sequence: int
    global_batch_sequences: int
    lora: bool = False
    imbalance: float = 1.0  # busiest expert over the mean
    weights: Weights = "fp32"  # bf16: no fp32 master weights, states in bf16
    adjacent_experts: bool = False  # expert ranks adjacent, as in published runs, not tp apart
    on_cpu: bool = False
    lora_rank: int = DEFAULT_LORA_RANK

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0: everything is trained."""
        return self.lora_rank if self.lora else 0

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch_sequences // (self.layout.data_parallel * self.layout.micro_batch))

    @property
    def tokens(self) -> int:
        return self.global_batch_sequences * self.sequence


class StepModel:
    """The steps of one job on one machine; terms that layouts share are evaluated once."""

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
        lora_rank: int = DEFAULT_LORA_RANK,
        graphs: bool = True,
    ) -> None:
        self.shape, self.sequence, self.global_batch_sequences = shape, sequence, global_batch_sequences
        self.gpu, self.network, self.traits, self.lora, self.imbalance = gpu, network, traits, lora, imbalance
        self.host_link_bytes_per_second = host_link_bytes_per_second
        self.weights, self.adjacent_experts, self.lora_rank = weights, adjacent_experts, lora_rank
        self.graphs = graphs  # whether a rank that trains alone may use CUDA graphs
        self.trained = trained_share(shape, lora_rank if lora else 0)
        self._operators: dict[tuple[int, int, int, int, str, bool], tuple[LayerTerms, LayerTerms]] = {}
        self._transfers: dict[tuple[int | str, ...], tuple[tuple[float, float], ...]] = {}

    def workload(self, layout: Layout) -> Workload:
        """Return the workload of a layout, for the memory model."""
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
            self.lora_rank,
        )

    def terms(self, layout: Layout) -> StepTerms:
        """Evaluate operators and collectives of one step."""
        shape, network, traits = self.shape, self.network, self.traits
        layer, head = self._operators_of(layout)
        pp, vpp = layout.pp, max(1, layout.vpp)
        micro_batches = max(1, self.global_batch_sequences // (layout.data_parallel * layout.micro_batch))
        layers = float(num_layers(shape, traits))
        heads = 1.0 + layers - shape.layers
        full_layers, full_heads = fullest_rank(layers, heads, pp, vpp)
        send = 0.0
        if pp > 1:
            size = boundary_bytes(shape, layout, self.sequence)
            send = point_to_point_seconds(size, layout.world // pp < network.nvlink_domain, network)

        parameters = layers * layer.parameters / pp + head.parameters
        expert_parameters = layers * layer.expert_parameters / pp
        moves = passes(layout, traits, micro_batches)
        key = (pp, layout.replicate, layout.fsdp, layout.cp, layout.tp, layout.ep, layout.zero, layout.precision)
        if key not in self._transfers:
            layer_shard = head_shard = first = once = (0.0, 0.0)
            if layout.zero > 1:
                layer_shard, head_shard, first = self._shard_transfers(layout)
            elif moves.gathers and traits.fsdp2:
                mean, tables, _ = self._shard_transfers(layout)
                once = (layers / pp * mean[0] + tables[0], layers / pp * mean[1] + tables[1])
            elif moves.gathers:
                once = self._shard_seconds(parameters, expert_parameters, layout)
            reduce = self._copies_seconds(parameters, expert_parameters, layout)
            self._transfers[key] = (layer_shard, head_shard, first, (once[0], once[1] + reduce))
        layer_shard, head_shard, first, (once_gather, once_reduce) = self._transfers[key]
        ranks = layout.fsdp * layout.cp  # context-parallel ranks also shard the optimizer
        expert_ranks = max(1, ranks * layout.tp // layout.ep) if ranks > 1 or traits.fsdp2 else 1
        local = parameters / ranks + expert_parameters / expert_ranks
        trained = local * self.trained
        optimizer_seconds, offload_once, offload_layer = self._optimizer_and_offload(trained, layout)
        domain = network.nvlink_domain
        terms = StepTerms(
            layer=layer,
            head=head,
            num_layers=layers,
            num_heads=heads,
            full_layers=float(full_layers),
            full_heads=float(full_heads),
            pp=pp,
            vpp=vpp,
            micro_batches=float(micro_batches),
            bubble_factor=ZERO_BUBBLE if layout.schedule == "zero-bubble" else 1.0,
            send_seconds=send,
            sends=0.0 if pp == 1 else float(vpp) if vpp > 1 else 2.0,  # interleaving hides half of its 2 · vpp sends
            fsdp_passes=(
                moves.gathers / micro_batches,
                moves.gathers_again / micro_batches,
                moves.scatters / micro_batches,
            ),
            table_gathers=moves.table_gathers / micro_batches,
            layer_shard=layer_shard,
            head_shard=head_shard,
            first_gather_seconds=first[0],
            once_gather_seconds=once_gather,
            once_reduce_seconds=once_reduce,
            optimizer_seconds=optimizer_seconds,
            offload_once_seconds=offload_once,
            offload_layer_seconds=offload_layer,
            gemm_index=_GEMM_CONSTANT[layout.precision],
            repeated=repeated(layout, traits),
            gradient_overlap=float(traits.gradient_overlap),
            overlap=0.0 if self.gpu.generation == "cpu" else 1.0,
            tensor_far=float(layout.tp > domain),
            context_far=float(layout.tp * layout.cp > domain),
            exchange_far=float(layout.ep * self._expert_stride(layout) > domain),
            shard_far=float(layout.tp * layout.cp * layout.data_parallel > domain),
            nodes_log2=math.log2(max(1.0, layout.world / network.node_gpus)),
        )
        if self._launches_eagerly(layout):
            operation = self.gpu.operation_seconds
            whole = host_seconds(
                shape,
                layout,
                traits,
                full_layers,
                micro_batches + (pp - 1) / vpp,
                lora=self.lora,
                operation_seconds=operation,
            )
            terms = replace(terms, host_seconds=whole, host_forward_seconds=forward_seconds(full_layers, operation))
        if self.gpu.cpu is None:
            return terms
        tensors = num_tensors(shape, layout, self._kinds(), self.lora_rank if self.lora else 0)
        small = all_reduce_seconds(1.0, group_of(layout.world, 1, network), network)
        return cpu_step_terms(terms, layout, self.gpu, traits, tensors=tensors, collective_seconds=small)

    def _launches_eagerly(self, layout: Layout) -> bool:
        """Whether the host launches every kernel, so that a step is not faster than it."""
        return self.gpu.operation_seconds > 0 and launches_eagerly(layout, self.traits, self.graphs)

    def _operators_of(self, layout: Layout) -> tuple[LayerTerms, LayerTerms]:
        """Return (mean layer, head): the same for all layouts with the same operator split."""
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.precision, layout.pp > 1)
        if self.gpu.cpu is not None:  # their operations depend on the whole layout
            return self._cpu_operators_of(layout)
        if key not in self._operators:
            shape = self.shape
            kinds = [(self._layer_terms(layout, moe), count) for moe, count in self._kinds()]
            head = head_terms(shape, layout, self.sequence, self.gpu, self.network, self.traits, lora=self.lora)
            self._operators[key] = (_mean(kinds), head)
        return self._operators[key]

    def _layer_terms(self, layout: Layout, moe: bool) -> LayerTerms:
        return layer_terms(
            self.shape,
            layout,
            self.sequence,
            self.gpu,
            self.network,
            self.traits,
            moe=moe,
            lora=self.lora,
            imbalance=self.imbalance,
            expert_stride=self._expert_stride(layout),
        )

    def _cpu_operators_of(self, layout: Layout) -> tuple[LayerTerms, LayerTerms]:
        shape, gpu, traits = self.shape, self.gpu, self.traits
        kinds = [
            (
                cpu_layer_terms(
                    self._layer_terms(layout, moe),
                    shape,
                    layout,
                    self.sequence,
                    gpu,
                    traits,
                    moe=moe,
                    lora_rank=self.lora_rank if self.lora else 0,
                    imbalance=self.imbalance,
                ),
                count,
            )
            for moe, count in self._kinds()
        ]
        head = head_terms(shape, layout, self.sequence, gpu, self.network, traits, lora=self.lora)
        return _mean(kinds), cpu_head_terms(head, shape, layout, self.sequence, gpu, traits, lora=self.lora)

    def _kinds(self) -> list[tuple[bool, int]]:
        """Return (has experts, number of layers)."""
        shape, layers = self.shape, num_layers(self.shape, self.traits)
        moe_layers = layers - shape.dense_layers if shape.is_moe else 0
        return [(moe, count) for moe, count in ((False, layers - moe_layers), (True, moe_layers)) if count]

    def _shard_transfers(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Return FSDP's (all-gather of weights, reduce-scatter of gradients), once: of the mean layer, of the tables,
        and of the tables needed first: all if they are one group, else the embedding."""
        traits = self.traits

        def seconds(weights: tuple[Weight, ...]) -> tuple[float, float]:
            size, experts = (padded_size(weights, layout, traits, experts=experts) for experts in (False, True))
            return self._shard_seconds(size, experts, layout)

        kinds = self._kinds()
        total = sum(count for _, count in kinds)
        gather = scatter = 0.0
        for moe, count in kinds:
            of_kind = seconds(layer_weights(self.shape, layout.tp, layout.ep, moe=moe))
            gather, scatter = gather + of_kind[0] * count / total, scatter + of_kind[1] * count / total
        alone = layout.pp == 1
        tables = seconds(table_weights(self.shape, layout.tp, embeds=alone, predicts=True))
        embedding = seconds(table_weights(self.shape, layout.tp, embeds=True, predicts=False))
        return (gather, scatter), tables, tables if traits.fsdp2 or not alone else embedding

    def _shard_seconds(self, size: float, experts: float, layout: Layout) -> tuple[float, float]:
        """Return the same for `size` parameters in one call, and for experts in a separate call. The buckets of a
        sharded optimizer are so large that their number does not matter."""
        traits, network = self.traits, self.network
        group = group_of(shards_of(layout, traits), layout.tp, network)
        value, width = gathered_bytes(layout), gradient_bytes(layout, traits) * self.trained
        if self.lora and layout.zero == 1:  # only trained weights are gathered from the optimizer's shards
            value *= self.trained
        gather = all_gather_seconds(value * size, group, network)
        scatter = reduce_scatter_seconds(width * size, group, network)
        if experts:
            group = self._expert_group(expert_shards_of(layout, traits), layout)
            gather += all_gather_seconds(value * experts, group, network)
            scatter += reduce_scatter_seconds(width * experts, group, network)
        return gather, scatter

    def _copies_seconds(self, parameters: float, expert_parameters: float, layout: Layout) -> float:
        """Return the time of gradient all-reduce between ranks with the same shard, once per step (DDP and HSDP), and
        between tensor-parallel ranks, for weights with partial gradients."""
        network, traits = self.network, self.traits
        shards, expert_shards = shards_of(layout, traits), expert_shards_of(layout, traits)
        width = gradient_bytes(layout, traits) * self.trained
        group = group_of(copies_of(layout, traits), layout.tp * shards, network)
        seconds = all_reduce_seconds(width * parameters / shards, group, network)
        copies = expert_copies_of(layout, traits)
        # An expert is on every ep-th rank; ranks of the same shard group hold a shard of it each, the others a copy.
        if shards > 1:
            group = group_of(copies, layout.tp * shards, network)
        else:
            group = self._expert_group(copies, layout)
        seconds += all_reduce_seconds(width * expert_parameters / expert_shards, group, network)
        if layout.tp > 1 and traits.sequence_parallel:
            partial = sum(
                count * padded_partial_size(layer_weights(self.shape, layout.tp, layout.ep, moe=moe), layout, traits)
                for moe, count in self._kinds()
            )
            size = width * partial / layout.pp / shards
            seconds += all_reduce_seconds(size, group_of(layout.tp, 1, network), network)
        return seconds

    def _expert_stride(self, layout: Layout) -> int:
        """Return the distance between ranks of one expert-parallel group."""
        return 1 if self.adjacent_experts else layout.tp

    def _expert_group(self, size: int, layout: Layout) -> Group:
        """Return the group with the same experts: every ep-th rank, or whole tensor-parallel groups, every ep-th."""
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
        """Return (optimizer on the device, optimizer on the host, one layer's activations to the host)."""
        link = self.host_link_bytes_per_second
        if layout.offload == "optimizer":
            moved = (gradient_bytes(layout, self.traits) + OUTPUT_BYTES[layout.precision]) * trained / link
            return 0.0, moved + self._optimizer_bytes(layout) * trained / HOST_OPTIMIZER_BYTES_PER_SECOND, 0.0
        tokens = layout.micro_batch * self.sequence / layout.cp
        saved = SAVED_BYTES * tokens * self.shape.hidden / layout.tp if layout.offload == "activations" else 0.0
        return self._optimizer_bytes(layout) * trained / self.gpu.streaming_bytes_per_second, 0.0, saved / link

    def _optimizer_bytes(self, layout: Layout) -> float:
        if self.weights == "bf16":
            return BF16_OPTIMIZER_BYTES
        # the 16-bit weight is written too; FSDP2 has none, and casts when it gathers
        copy = 0.0 if layout.precision == "fp32" or (self.traits.fsdp2 and layout.world > 1) else 2.0
        return MASTER_OPTIMIZER_BYTES + copy + gradient_bytes(layout, self.traits)


def evaluation_terms(terms: StepTerms, layout: Layout, sequences: int) -> StepTerms:
    """Return the terms of an evaluation: the forward pass of `sequences`, with the layout of a step."""

    def forward(layer: LayerTerms) -> LayerTerms:
        both: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields(layer)}
        forwards: dict[str, Any] = {name: (pair[0], 0.0) for name, pair in both.items() if isinstance(pair, tuple)}
        return replace(layer, **forwards)

    gathers = terms.fsdp_passes[0]
    count = float(max(1, -(-sequences // (layout.data_parallel * layout.micro_batch))))
    return replace(
        terms,
        layer=forward(terms.layer),
        head=forward(terms.head),
        micro_batches=count,
        fsdp_passes=(gathers, 0.0, 0.0),
        once_gather_seconds=0.0,
        once_reduce_seconds=0.0,
        optimizer_seconds=0.0,
        offload_once_seconds=0.0,
        host_seconds=count * terms.host_forward_seconds,
        repeated=RECOMPUTED["none"],
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
        lora_rank=work.lora_rank,
    )
    return model.terms(work.layout)


@lru_cache(maxsize=4096)
def fullest_rank(num_layers: float, num_heads: float, pp: int, vpp: int) -> tuple[float, float]:
    """Return (layers, heads) of the pipeline rank with the most layers.

    If layers divide evenly, the last rank has the head on top of its share; otherwise stages are uneven and the rank
    with the head gets fewer layers. `compose` uses an even share of everything if that is more.
    """
    if pp == 1:
        return num_layers, num_heads
    per_rank = sum(len(layers) for layers in stage_layers(int(num_layers), pp, vpp)[::pp])
    return float(per_rank), num_heads if num_layers % (pp * vpp) == 0 else 0.0


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
