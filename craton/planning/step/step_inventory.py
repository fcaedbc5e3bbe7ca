"""Inventory of one step: every collective with its bytes and all FLOPs, for each pipeline rank that differs.

The seconds of a plan use the same sizes (`operations`, `sharding`), so a matching trace of the real step confirms them.
Bytes of a collective are those of its full tensor, the larger side, summed over the calls of a step; a group of one
rank moves nothing and is not listed. Routing is assumed to be balanced. Collectives of a few numbers (norms, loads of
experts) are not counted, except the two over all ranks. With adapters the first layer counts like all others, although
nothing before it needs a gradient; the seconds of a plan do not include the adapters' own matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from craton.job.layout import Layout, stage_layers
from craton.planning.software import Traits
from craton.planning.step.adapters import adapter_operations, adapter_weights
from craton.planning.step.operations import (
    Dimension,
    Operation,
    Operations,
    Transfer,
    Weight,
    boundary_bytes,
    head_operations,
    layer_operations,
    layer_weights,
    repeated,
    table_weights,
)
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
from craton.planning.step.training import Workload

FLOPS = ("gemm", "attention", "experts", "head")
AGREED_BYTES = 16.0  # per step: number of labels and stop requests, fp64
LOSS_BYTES = 4.0
# Matmuls per product: the output and the gradients of its input and its weight; frozen weights have none.
TRAINED_PASSES, FROZEN_PASSES = 3.0, 2.0
OPERATIONS_OF_PIPELINE: tuple[Operation, ...] = ("send", "recv")


@dataclass(frozen=True)
class InventoryEntry:
    """All calls of one collective over groups of one size in one step of one rank."""

    operation: Operation
    dimension: Dimension
    ranks: int  # of the group
    count: float
    size_bytes: float


@dataclass(frozen=True)
class StageInventory:
    """A step of one pipeline rank."""

    pipeline_rank: int
    dense_layers: int
    moe_layers: int
    entries: tuple[InventoryEntry, ...]
    flops: dict[str, float]  # FLOPS → FLOPs per step

    def size_bytes(self, operation: Operation, dimension: Dimension) -> float:
        return sum(e.size_bytes for e in self.entries if (e.operation, e.dimension) == (operation, dimension))

    def count(self, operation: Operation, dimension: Dimension) -> float:
        return sum(e.count for e in self.entries if (e.operation, e.dimension) == (operation, dimension))


@dataclass(frozen=True)
class Inventory:
    stages: tuple[StageInventory, ...]  # one of each kind, in the order of the pipeline

    def of_rank(self, pipeline_rank: int) -> StageInventory:
        """Return the stage of a pipeline rank: the last listed one at or before it."""
        return next(stage for stage in reversed(self.stages) if stage.pipeline_rank <= pipeline_rank)


def inventory(work: Workload, traits: Traits) -> Inventory:
    """Return every pipeline rank that differs from the one before it."""
    stages: list[StageInventory] = []
    for rank in range(work.layout.pp):
        stage = _Count(work, traits, rank).stage()
        if not stages or (stage.entries, stage.flops) != (stages[-1].entries, stages[-1].flops):
            stages.append(stage)
    return Inventory(tuple(stages))


@dataclass
class _Count:
    """Accumulates the step of one pipeline rank."""

    work: Workload
    traits: Traits
    rank: int
    found: dict[tuple[Operation, Dimension, int], tuple[float, float]] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FLOPS, 0.0))

    def stage(self) -> StageInventory:
        work, layout, traits = self.work, self.work.layout, self.traits
        shape, micro_batches = work.shape, float(work.micro_batches)
        stages = stage_layers(num_layers(shape, traits), layout.pp, layout.vpp)[self.rank :: layout.pp]
        layers = [layer for stage in stages for layer in stage]
        num_dense = sum(layer < shape.dense_layers for layer in layers) if shape.is_moe else len(layers)
        embeds, predicts = self.rank == 0, self.rank == layout.pp - 1
        kinds = [(moe, count) for moe, count in ((False, num_dense), (True, len(layers) - num_dense)) if count]

        again = repeated(layout, traits)
        for moe, count in kinds:
            operations = layer_operations(shape, layout, work.sequence, traits, moe=moe)
            self._calculate(operations, count * micro_batches)
            forward, backward = operations.forward, operations.backward
            if work.lora:
                adapters = adapter_operations(shape, layout, work.sequence, traits, work.lora_rank, moe=moe)
                passes_of_adapters = TRAINED_PASSES + again.products
                flops = sum(product.flops for product in adapters.products)
                self.flops["gemm"] += count * micro_batches * passes_of_adapters * flops
                forward, backward = (*forward, *adapters.forward), (*backward, *adapters.backward)
            for transfer in forward:
                share = again.sums if transfer.operation == "reduce_scatter" else again.collectives
                if transfer.dimension in ("cp", "cp·tp"):  # attention needs its keys again
                    share = max(share, again.attention)
                self._add(transfer, count * micro_batches * (1.0 + share))
            self._add_backward(backward, count * micro_batches)
        ends = head_operations(shape, layout, work.sequence, traits, embeds=embeds, predicts=predicts)
        self.flops["head"] += self._passes() * micro_batches * sum(product.flops for product in ends.mlp)
        for transfer in ends.forward:
            self._add(transfer, micro_batches)
        self._add_backward(ends.backward, micro_batches)

        tables = table_weights(shape, layout.tp, embeds=embeds, predicts=predicts)
        self._shard(kinds, tables)
        self._hand_on(len(stages))
        if layout.world > 1:
            self._add(Transfer("all_reduce", "all", AGREED_BYTES), 1.0)
            self._add(Transfer("all_reduce", "all", LOSS_BYTES), 1.0)
        entries = tuple(
            InventoryEntry(operation, dimension, ranks, count, size)
            for (operation, dimension, ranks), (count, size) in sorted(self.found.items())
        )
        return StageInventory(self.rank, num_dense, len(layers) - num_dense, entries, self.flops)

    def _passes(self) -> float:
        """Number of matmuls per product of a layer."""
        return FROZEN_PASSES if self.work.lora else TRAINED_PASSES

    def _calculate(self, operations: Operations, times: float) -> None:
        again = repeated(self.work.layout, self.traits)
        passes_of_products = self._passes() + again.products
        self.flops["gemm"] += times * passes_of_products * sum(product.flops for product in operations.products)
        self.flops["gemm"] += times * sum(product.flops for product in operations.again)
        self.flops["experts"] += times * passes_of_products * sum(product.flops for product in operations.experts)
        for call, share in operations.attention:
            forward, backward = call.flops(backward=False), call.flops(backward=True)
            self.flops["attention"] += times * share * ((1.0 + again.attention) * forward + backward)

    def _shard(self, kinds: list[tuple[bool, int]], tables: tuple[Weight, ...]) -> None:
        """Add transfers of weights and gradients between data-parallel ranks."""
        layout, traits, shape = self.work.layout, self.traits, self.work.shape
        moves = passes(layout, traits, self.work.micro_batches)
        value, width = gathered_bytes(layout), gradient_bytes(layout, traits)
        partial = 0.0
        groups = [(layer_weights(shape, layout.tp, layout.ep, moe=moe), count) for moe, count in kinds]
        for weights, count in [*groups, (tables, 1)]:
            is_table = weights is tables
            gathers = moves.table_gathers if is_table else moves.gathers + moves.gathers_again
            sizes = [padded_size(weights, layout, traits, experts=experts) for experts in (False, True)]
            trained, trained_weights = sizes, weights
            if self.work.lora:
                adapters = () if is_table else adapter_weights(weights, self.work.lora_rank)
                trained_weights = tuple(item for pair in adapters for item in pair)
                trained = [padded_size(trained_weights, layout, traits, experts=False), 0.0]
                sizes[0] += trained[0]
            partial += count * padded_partial_size(trained_weights, layout, traits)
            with_layer = layout.ep * layout.tp == 1 and traits.fsdp2  # then experts have no separate groups
            rest, of_experts = (False, sizes[0], trained[0]), (True, sizes[1], trained[1])
            groups_of = ((False, sum(sizes), sum(trained)),) if with_layer else (rest, of_experts)
            for experts, size, reduced in groups_of:
                shards = expert_shards_of(layout, traits) if experts else shards_of(layout, traits)
                copies = expert_copies_of(layout, traits) if experts else copies_of(layout, traits)
                self._add(Transfer("all_gather", "fsdp", value * size), count * gathers, shards)
                self._add(Transfer("reduce_scatter", "fsdp", width * reduced), count * moves.scatters, shards)
                self._add(Transfer("all_reduce", "replicate", width * reduced / shards), count, copies)
        if traits.sequence_parallel:
            self._add(Transfer("all_reduce", "tp", width * partial / shards_of(layout, traits)), 1.0)

    def _hand_on(self, num_stages: int) -> None:
        """Add activations to the next stage and their gradients back; every stage except the first and the last has two
        neighbours."""
        layout = self.work.layout
        if layout.pp == 1:
            return
        size = boundary_bytes(self.work.shape, layout, self.work.sequence)
        behind = num_stages - (self.rank == layout.pp - 1)  # stages with a next stage
        before = num_stages - (self.rank == 0)
        tied = self.work.shape.tied_embeddings and not self.work.lora and self.rank in (0, layout.pp - 1)
        for operation in OPERATIONS_OF_PIPELINE:
            self._add(Transfer(operation, "pp", size), float(self.work.micro_batches * (behind + before)))
            if tied:  # both ends hold the table and sum their gradients
                table = padded_size(
                    table_weights(self.work.shape, layout.tp, embeds=True, predicts=False),
                    layout,
                    self.traits,
                    experts=False,
                )
                self._add(Transfer(operation, "pp", 4.0 * table / shards_of(layout, self.traits)), 1.0)

    def _add_backward(self, transfers: tuple[Transfer, ...], times: float) -> None:
        for transfer in transfers:
            if not (self.work.lora and transfer.for_weights):
                self._add(transfer, times)

    def _add(self, transfer: Transfer, times: float, ranks: int = 0) -> None:
        ranks = ranks or _group_size(self.work.layout, transfer.dimension)
        if ranks == 1 or not times or not transfer.size_bytes:
            return
        key = (transfer.operation, transfer.dimension, ranks)
        count, size = self.found.get(key, (0.0, 0.0))
        calls = times * transfer.count
        self.found[key] = (count + calls, size + calls * transfer.size_bytes)


def _group_size(layout: Layout, dimension: Dimension) -> int:
    if dimension == "all":
        return layout.world
    return layout.cp * layout.tp if dimension == "cp·tp" else int(getattr(layout, dimension))
