"""Memory of a rank that trains with craton/ml: FSDP2's buffers and the layers of `own_layers`, instant by instant.

FSDP2 keeps fp32 shards, gathers weights in 16 bit and reduces gradients in fp32. The fp32 copy of a group's gradients
lives until the next group is reduced, that of the tables until the next micro-batch's backward pass. A single rank
keeps 16-bit weights with fp32 master weights in the optimizer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from craton.job.layout import Layout, stage_layers
from craton.job.model import ModelShape
from craton.planning.memory.footprint import (
    BF16_MOMENT_BYTES,
    BUCKET_PARAMETERS,
    MASTER_BYTES,
    MOMENT_BYTES,
    StageBytes,
)
from craton.planning.memory.own_layers import OwnLayer, own_layers
from craton.planning.software import Traits
from craton.planning.step import (
    Weight,
    Workload,
    adapter_weights,
    expert_shards_of,
    gradient_bytes,
    head_chunk_bytes,
    layer_weights,
    num_layers,
    padded_size,
    pipeline_loads,
    shards_of,
    table_weights,
    total_size,
)

FP32 = 4.0


def own_stages(work: Workload, traits: Traits, runtime: float) -> list[StageBytes]:
    """Return the pipeline ranks that can be the worst: the first two and the last."""
    shape, layout = work.shape, work.layout
    rank = work.adapter_rank
    held = _held(shape, traits, layout.fsdp, layout.cp, layout.tp, layout.ep, rank)
    layers = own_layers(shape, layout.tp, layout.ep, layout.cp, layout.precision, layout.recompute, lora_rank=rank)
    places = (0,) if layout.pp == 1 else (0, 1) if layout.pp == 2 else (0, 1, layout.pp - 1)
    return [_stage(work, traits, place, runtime, held, layers) for place in places]


class _Numbers(NamedTuple):
    """Parameter counts of one layer or of the tables."""

    whole: float  # before sharding
    group: float  # of its largest FSDP group
    shard: float


class _Held(NamedTuple):
    """Parameters of a rank, for every position in a pipeline."""

    layers: tuple[_Numbers, _Numbers]  # dense, with experts
    tables: dict[tuple[bool, bool], _Numbers]  # by (has the embedding, has the head)
    trained_layers: tuple[_Numbers, _Numbers]  # the adapters if there are any, and nothing of the tables
    trained_tables: dict[tuple[bool, bool], _Numbers]


@lru_cache(maxsize=4096)
def _held(shape: ModelShape, traits: Traits, fsdp: int, cp: int, tp: int, ep: int, lora_rank: int) -> _Held:
    layout = Layout(fsdp=fsdp, cp=cp, tp=tp, ep=ep)

    def numbers(weights: tuple[Weight, ...]) -> _Numbers:
        rest, experts = total_size(weights, experts=False), total_size(weights, experts=True)
        shard = padded_size(weights, layout, traits, experts=False) / shards_of(layout, traits)
        shard += padded_size(weights, layout, traits, experts=True) / expert_shards_of(layout, traits)
        has_own_group = ep * tp > 1
        return _Numbers(rest + experts, max(rest, experts) if has_own_group else rest + experts, shard)

    of_layers = [layer_weights(shape, tp, ep, moe=moe) for moe in (False, shape.is_moe)]
    ends = ((True, True), (True, False), (False, True), (False, False))
    tables = {end: numbers(table_weights(shape, tp, embeds=end[0], predicts=end[1])) for end in ends}
    if not lora_rank:
        dense, moe = (numbers(weights) for weights in of_layers)
        return _Held((dense, moe), tables, (dense, moe), tables)
    adapters = [tuple(item for pair in adapter_weights(weights, lora_rank) for item in pair) for weights in of_layers]
    dense, moe = (numbers((*weights, *added)) for weights, added in zip(of_layers, adapters, strict=True))
    trained_dense, trained_moe = (numbers(added) for added in adapters)
    return _Held((dense, moe), tables, (trained_dense, trained_moe), dict.fromkeys(ends, numbers(())))


def _stage(
    work: Workload, traits: Traits, rank: int, runtime: float, held: _Held, layers: tuple[OwnLayer, OwnLayer]
) -> StageBytes:
    shape, layout = work.shape, work.layout
    micro_batches = work.micro_batches
    tokens = layout.micro_batch * work.sequence / layout.cp
    layers_of_all = num_layers(shape, traits)
    leading = shape.dense_layers if shape.is_moe else layers_of_all
    num_dense, num_moe = _layer_counts(layers_of_all, leading, layout.pp, layout.vpp, rank)
    embeds, predicts = rank == 0, rank == layout.pp - 1
    tables, (dense, moe) = held.tables[embeds, predicts], held.layers
    largest, layer = held.layers[num_moe > 0], layers[num_moe > 0]
    full = tables.whole + num_dense * dense.whole + num_moe * moe.whole
    own = tables.shard + num_dense * dense.shard + num_moe * moe.shard
    trained_tables, (trained_dense, trained_moe) = held.trained_tables[embeds, predicts], held.trained_layers
    trained_largest = held.trained_layers[num_moe > 0]
    trained_of_layers = num_dense * trained_dense.whole + num_moe * trained_moe.whole
    trained_full = trained_tables.whole + trained_of_layers
    trained_own = trained_tables.shard + num_dense * trained_dense.shard + num_moe * trained_moe.shard

    low, narrow, alone = layout.precision != "fp32", work.weights == "bf16", layout.world == 1
    value = 2.0 if low else FP32
    width = gradient_bytes(layout, traits)
    weight_bytes = 2.0 if low and (narrow or alone) else FP32
    has_masters = alone and low and not narrow
    states = (BF16_MOMENT_BYTES if narrow and low else MOMENT_BYTES) + (MASTER_BYTES if has_masters else 0.0)
    optimizer = states * trained_own
    if layout.offload == "optimizer":  # planned, not trained yet: exchanged with the host bucket by bucket
        optimizer = min(optimizer, 2.0 * BUCKET_PARAMETERS * states)
    head = value * shape.vocab * shape.hidden / layout.tp if predicts and not work.lora else 0.0

    sharded = layout.fsdp * layout.cp > 1
    reduces_each = sharded and layout.zero > 1 and layout.pp == 1
    frees = sharded and layout.zero == 3 and layout.pp == 1
    has_sums = micro_batches > 1
    of_tables, of_group = trained_tables.whole, trained_largest.group
    if alone:
        landed = (FP32 if has_masters and micro_batches > 1 else value) * trained_own
        summed = landed if has_sums else 0.0
        reduced = at_end = value * trained_own if micro_batches > 1 and has_masters else 0.0
        copied = reducing = gathered = gathered_loss = gathered_reduced = 0.0
    else:
        landed = weight_bytes * trained_own
        copied = width * of_tables if reduces_each and has_sums else 0.0  # of the previous micro-batch
        summed = (landed if reduces_each else width * trained_full) if has_sums else 0.0
        reducing = width if reduces_each or micro_batches == 1 else 0.0  # else unsharded gradients accumulate first
        after = landed if reducing else width * trained_full  # the first backward pass
        reduced = after - landed + (value + width) * of_group
        at_end = (value if reducing else width) * of_tables + width * of_tables - weight_bytes * trained_tables.shard
        gathered_loss = value * (tables.whole if frees else full)
        gathered = value * (tables.whole + 2.0 * largest.whole) if frees else gathered_loss
        gathered_reduced = gathered - value * largest.whole if frees else gathered

    once = tokens * (num_dense * layers[0].kept + num_moe * layers[1].kept)
    stream = value * tokens * shape.hidden / layout.tp
    logits, head_activations = _head(shape, layout, tokens, value, head) if predicts else (0.0, 0.0)
    boundary = 4.0 * stream if layout.pp > 1 else 0.0
    work_tokens = tokens * (layer.again + layer.work)
    in_work = work_tokens + layer.work_bytes * trained_largest.whole / largest.whole
    if layout.pp > 1:
        later_once = tokens * (num_dense * layers[0].late + num_moe * layers[1].late)
        chunk = _Chunk(
            layers=max(1.0, (num_dense + num_moe) / layout.vpp),
            kept=once / layout.vpp,
            late=later_once / layout.vpp,
            in_work=work_tokens if layout.schedule == "zero-bubble" else in_work,
            stream=stream,
            gradients=value * trained_of_layers / layout.vpp,
            group=value * of_group,
            tables=value * of_tables,
            head=head,
            landed=landed,
            widened=width / value,
        )
        forward, first, later = _pipeline_instants(layout, micro_batches, rank, chunk)
        gathered_backward = gathered
    else:
        forward = _Instant(summed + copied, once)
        # The backward pass of the first layer; the reduction of its gradients, after its activations are freed; or the
        # backward pass of the second layer during the reduction of the first.
        without = once - tokens * layer.kept
        first, gathered_backward = max(
            (_Instant(summed + copied + head, once, in_work), gathered),
            (_Instant(summed + head + (value + reducing) * of_group, without, stream), gathered_reduced),
            (_Instant(summed + head + reducing * of_group, without, in_work), gathered),
            key=lambda at: sum(at[0]) + at[1],
        )
        later = _Instant(landed + reduced, 0.0, stream)
    if layout.offload == "activations":  # one layer in transfer, one being computed
        most = 2.0 * tokens * layer.kept
        forward, first, later = (at._replace(activations=min(at.activations, most)) for at in (forward, first, later))
    return StageBytes(
        parameters=weight_bytes * own // 1.0,
        optimizer=optimizer // 1.0,
        runtime=runtime,
        gradients=later.gradients // 1.0,
        gradients_forward=forward.gradients // 1.0,
        gradients_backward=first.gradients // 1.0,
        gradients_step=landed // 1.0,
        activations=forward.activations // 1.0,
        first_activations=first.activations // 1.0,
        later_activations=later.activations // 1.0,
        head_activations=head_activations // 1.0,
        logits=logits // 1.0,
        unsharded=gathered // 1.0,
        unsharded_loss=gathered_loss // 1.0,
        unsharded_backward=gathered_backward // 1.0,
        layer_in_work=first.in_work // 1.0,
        later_in_work=later.in_work // 1.0,
        buffers=(boundary + tokens * layer.forward) // 1.0,
        buffers_backward=boundary // 1.0,
        temporaries=max(0.0, at_end) // 1.0,
    )


class _Instant(NamedTuple):
    gradients: float
    activations: float
    in_work: float = 0.0


class _Chunk(NamedTuple):
    """Bytes of one chunk's pass on a pipeline rank, and of the tensors alive beside it."""

    layers: float
    kept: float
    late: float  # until its weight gradients are computed
    in_work: float  # of a layer
    stream: float
    gradients: float  # of the layers, as they are computed
    group: float  # of its largest FSDP group
    tables: float  # of embedding or head
    head: float  # computed with the loss
    landed: float  # of all, reduced
    widened: float  # width factor of accumulated gradients


def _pipeline_instants(
    layout: Layout, micro_batches: int, rank: int, chunk: _Chunk
) -> tuple[_Instant, _Instant, _Instant]:
    """Return the peak instants of forward passes, of backward layers, and of gradient accumulation."""
    forward, first, later = [], [], []
    layer = 1.0 / chunk.layers
    for load in pipeline_loads(layout.schedule, layout.pp, layout.vpp, micro_batches, rank):
        sums = chunk.widened * (load.summed * chunk.gradients + load.tables * chunk.tables)
        new_sums = chunk.widened * chunk.gradients if load.starts_sum else 0.0
        activations = load.passes * chunk.kept + load.late * chunk.late
        head = chunk.head if load.has_tables else 0.0
        if load.kind == "forward":
            forward.append(_Instant(sums, activations))
        elif load.kind == "backward":
            first.append(_Instant(sums + head, activations, chunk.in_work))
        elif load.kind == "weight":
            first.append(_Instant(sums, activations))
        else:
            taken = chunk.group
            if load.kind == "after backward":  # the chunk's first layer is the last in the backward pass
                others = new_sums * (1.0 - layer)
                kept = layer * (chunk.kept - chunk.late if layout.schedule == "zero-bubble" else chunk.kept)
                first.append(_Instant(sums + others + head, activations + kept, chunk.in_work))
                if load.has_tables:
                    at_end = chunk.tables * (1.0 + (0.0 if load.tables else chunk.widened))
                    later.append(_Instant(sums + new_sums + at_end, activations, chunk.stream))
            elif not (load.starts_sum or load.reduces):  # all of them are computed before one is added
                taken = chunk.gradients
            if load.reduces:
                taken = (1.0 + chunk.widened) * chunk.group + (0.0 if load.summed else chunk.landed)
            later.append(_Instant(sums + new_sums + taken, activations, chunk.stream))
    return max(forward, key=sum), max(first, key=sum), max(later, key=sum)


@lru_cache(maxsize=4096)
def _layer_counts(layers: int, dense_layers: int, pp: int, vpp: int, rank: int) -> tuple[int, int]:
    """Return (dense layers, layers with experts) of a pipeline rank; the `dense_layers` come first."""
    stages = stage_layers(layers, pp, vpp)[rank::pp]
    num_dense = sum(max(0, min(stage.stop, dense_layers) - stage.start) for stage in stages)
    return num_dense, sum(len(stage) for stage in stages) - num_dense


def _head(shape: ModelShape, layout: Layout, tokens: float, value: float, head: float) -> tuple[float, float]:
    """Return (logits with their gradients, input and output of the last norm). Vocabulary-parallel logits have a copy
    in fp32 and one at the end; the head's gradient exists from the second chunk on."""
    chunk = min(value * tokens * shape.vocab / layout.tp, head_chunk_bytes(layout))
    stream, whole = value * tokens * shape.hidden / layout.tp, value * tokens * shape.hidden
    is_one = value * tokens * shape.vocab / layout.tp <= head_chunk_bytes(layout)
    if layout.tp == 1:
        return chunk + head + whole, 2.0 * stream
    copies = chunk * (1.0 + (FP32 + value) / value)
    logits = max(copies, chunk + head) if is_one else copies + head
    return logits + whole, 2.0 * stream + whole
