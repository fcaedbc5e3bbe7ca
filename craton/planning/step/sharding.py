"""Data parallelism of weights and gradients: over how many ranks they are sharded, and how often they move.

Used for seconds (`training`), memory (`own_memory`) and the list of collectives (`step_inventory`).
"""

from __future__ import annotations

from typing import NamedTuple

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.rates import OUTPUT_BYTES
from craton.planning.software import Traits
from craton.planning.step.operations import Weight


class Passes(NamedTuple):
    """How often a step moves sharded tensors."""

    gathers: float  # of a layer's weights, forward
    gathers_again: float  # and backward
    table_gathers: float  # of embedding, last norm and head, which always stay gathered from forward to backward
    scatters: float  # of gradients


def passes(layout: Layout, traits: Traits, micro_batches: float) -> Passes:
    """Return the passes. FSDP frees weights after each use (ZeRO-3) and reduces after each micro-batch (ZeRO-2 and 3).
    In a pipeline weights stay gathered between micro-batches and gradients are accumulated first: both move once. The
    same holds for the tables in Craton's own loop, and with ZeRO-2 for all weights."""
    if shards_of(layout, traits) * expert_shards_of(layout, traits) == 1:
        return Passes(0.0, 0.0, 0.0, 0.0)
    if layout.pp > 1 or layout.zero == 1:
        return Passes(1.0, 0.0, 1.0, 1.0)
    gathers = 1.0 if traits.fsdp2 else micro_batches  # of weights that stay gathered from forward to backward
    if layout.zero == 3:
        return Passes(micro_batches, micro_batches, gathers, micro_batches)
    return Passes(gathers, 0.0, gathers, micro_batches)


def shards_of(layout: Layout, traits: Traits) -> int:
    """Return the number of ranks that shard the states of a weight. Context-parallel ranks are included; without fsdp
    only with FSDP2."""
    return layout.fsdp * layout.cp if layout.fsdp > 1 or traits.fsdp2 else 1


def expert_shards_of(layout: Layout, traits: Traits) -> int:
    """Return the same for an expert: fsdp · cp · tp / ep."""
    shards = shards_of(layout, traits)
    if shards == 1 and not traits.fsdp2:
        return 1
    return max(1, shards // layout.ep) * layout.tp if traits.fsdp2 else max(1, shards * layout.tp // layout.ep)


def copies_of(layout: Layout, traits: Traits) -> int:
    """Return the number of ranks that reduce the gradient of the same shard."""
    return layout.data_parallel * layout.cp // shards_of(layout, traits)


def expert_copies_of(layout: Layout, traits: Traits) -> int:
    ranks = max(1, layout.data_parallel * layout.cp * layout.tp // layout.ep)
    return max(1, ranks // expert_shards_of(layout, traits))


def total_size(weights: tuple[Weight, ...], *, experts: bool) -> float:
    return sum(weight.size for weight in weights if bool(weight.stacked) is experts)


def padded_partial_size(weights: tuple[Weight, ...], layout: Layout, traits: Traits) -> float:
    """Return the padded size of weights whose gradient is partial on each tensor-parallel rank."""
    return padded_size(tuple(weight for weight in weights if weight.is_partial), layout, traits, experts=False)


def padded_size(weights: tuple[Weight, ...], layout: Layout, traits: Traits, *, experts: bool) -> float:
    """Return the size of all shards together. FSDP2 shards rows, with padding if they do not divide; others shard one
    flat buffer."""
    if not traits.fsdp2:
        return total_size(weights, experts=experts)
    ranks = expert_shards_of(layout, traits) if experts else shards_of(layout, traits)
    return ranks * sum(weight.shard(ranks) for weight in weights if bool(weight.stacked) is experts)


def gathered_bytes(layout: Layout) -> float:
    """Return bytes per element of a gathered weight."""
    return OUTPUT_BYTES[layout.precision]


def gradient_bytes(layout: Layout, traits: Traits) -> float:
    """Return bytes per element of a reduced gradient. FSDP2 reduces in fp32; a single rank reduces nothing."""
    wide = traits.master_gradients or layout.precision == "fp32" or (traits.fsdp2 and layout.world > 1)
    return 4.0 if wide else 2.0


def num_layers(shape: ModelShape, traits: Traits) -> int:
    """Return the number of trained layers, including multi-token prediction if the stack has it."""
    return shape.layers + (shape.mtp_layers if traits.multi_token else 0)
