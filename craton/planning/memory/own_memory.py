"""Memory of a rank that trains with craton/ml: FSDP2's buffers and the layers of `own_layers`, instant by instant.

FSDP2 keeps fp32 shards, gathers weights in 16 bit and reduces gradients in fp32. The fp32 copy of a group's gradients
lives until the next group is reduced, that of the tables until the next micro-batch's backward pass. A single rank
keeps 16-bit weights with fp32 master weights in the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from craton.planning.memory.own_pipeline import Array, ChunkBytes, MomentBytes, pipeline_moments
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
    shards_of,
    table_weights,
    total_size,
)

FP32 = 4.0
ENDS = ((True, True), (True, False), (False, True), (False, False))  # whether a rank has the embedding, the head


def own_stages(work: Workload, layouts: Sequence[Layout], traits: Traits, runtime: Array) -> StageBytes:
    """Return the bytes of the pipeline ranks that can be the worst, the first two and the last: [3, layouts]. The same
    rank repeats in shorter pipelines. `work` is the work of every layout; `runtime` has a value for each."""
    shape, lora_rank = work.shape, work.adapter_rank
    at = _Columns(*(np.array([getattr(layout, name) for layout in layouts]) for name in _Columns._fields))
    pp, vpp, tp, cp = at.pp, at.vpp, at.tp, at.cp
    rank = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1])  # [3, layouts], as everything of a rank
    micro_batches = np.maximum(1, work.global_batch_sequences // (at.data_parallel * at.micro_batch))
    tokens = at.micro_batch * work.sequence / cp
    layers_of_all = num_layers(shape, traits)
    leading = shape.dense_layers if shape.is_moe else layers_of_all
    counts = _gathered((pp, vpp, rank), lambda *key: _layer_counts(layers_of_all, leading, *key))
    num_dense, num_moe = counts[..., 0], counts[..., 1]
    embeds, predicts = rank == 0, rank == pp - 1

    held = _gathered(
        (at.fsdp, cp, tp, at.ep), lambda *key: _held(shape, traits, lora_rank, *key)
    )  # [layouts, parts, numbers]
    end = np.where(embeds, np.where(predicts, 0, 1), np.where(predicts, 2, 3))  # of ENDS
    num_parts = 2 + len(ENDS)
    position = np.arange(len(pp))
    is_moe = (num_moe > 0).astype(np.int64)
    dense, moe = (_Numbers(*held[:, kind].T) for kind in (0, 1))
    largest = _Numbers(*np.moveaxis(held[position, is_moe], -1, 0))
    tables = _Numbers(*np.moveaxis(held[position, 2 + end], -1, 0))
    trained_dense, trained_moe = (_Numbers(*held[:, kind].T) for kind in (num_parts, num_parts + 1))
    trained_largest = _Numbers(*np.moveaxis(held[position, num_parts + is_moe], -1, 0))
    trained_tables = _Numbers(*np.moveaxis(held[position, num_parts + 2 + end], -1, 0))
    of_layers = _gathered(
        (tp, at.ep, cp, at.precision, at.recompute),
        lambda *key: [astuple(layer) for layer in own_layers(shape, *key, lora_rank=lora_rank)],
    )  # [layouts, (dense, with experts), fields]
    of_dense, of_moe = (OwnLayer(*of_layers[:, kind].T) for kind in (0, 1))
    layer = OwnLayer(*np.moveaxis(of_layers[position, is_moe], -1, 0))

    full = tables.whole + num_dense * dense.whole + num_moe * moe.whole
    own = tables.shard + num_dense * dense.shard + num_moe * moe.shard
    trained_of_layers = num_dense * trained_dense.whole + num_moe * trained_moe.whole
    trained_full = trained_tables.whole + trained_of_layers
    trained_own = trained_tables.shard + num_dense * trained_dense.shard + num_moe * trained_moe.shard

    low, narrow, alone = at.precision != "fp32", work.weights == "bf16", at.world == 1
    value = np.where(low, 2.0, FP32)
    width = np.array([gradient_bytes(layout, traits) for layout in layouts])
    weight_bytes = np.where(low & (narrow | alone), 2.0, FP32)
    has_masters = alone & low & (not narrow)
    states = np.where(low & narrow, BF16_MOMENT_BYTES, MOMENT_BYTES) + np.where(has_masters, MASTER_BYTES, 0.0)
    # offload is planned, not trained yet: exchanged with the host bucket by bucket
    away = np.where(at.offload == "optimizer", 2.0 * BUCKET_PARAMETERS * states, np.inf)
    optimizer = np.minimum(states * trained_own, away)
    head = np.where(predicts & (not work.lora), value * shape.vocab * shape.hidden / tp, 0.0)

    sharded = at.fsdp * cp > 1
    reduces_each = sharded & (at.zero > 1) & (pp == 1)
    frees = sharded & (at.zero == 3) & (pp == 1)
    has_sums = micro_batches > 1
    of_tables, of_group = trained_tables.whole, trained_largest.group
    # several ranks
    landed = weight_bytes * trained_own
    copied = np.where(reduces_each & has_sums, width * of_tables, 0.0)  # of the previous micro-batch
    summed = np.where(has_sums, np.where(reduces_each, landed, width * trained_full), 0.0)
    # else unsharded gradients accumulate first
    reducing = np.where(reduces_each | ~has_sums, width, 0.0)
    after = np.where(reducing > 0, landed, width * trained_full)  # the first backward pass
    reduced = after - landed + (value + width) * of_group
    at_end = np.where(reducing > 0, value, width) * of_tables + width * of_tables
    at_end = at_end - weight_bytes * trained_tables.shard
    gathered_loss = value * np.where(frees, tables.whole, full)
    gathered = np.where(frees, value * (tables.whole + 2.0 * largest.whole), gathered_loss)
    gathered_reduced = np.where(frees, gathered - value * largest.whole, gathered)
    # a single one, which keeps 16-bit weights and master weights
    alone_landed = np.where(has_masters & has_sums, FP32, value) * trained_own
    alone_reduced = np.where(has_sums & has_masters, value * trained_own, 0.0)
    summed = np.where(alone, np.where(has_sums, alone_landed, 0.0), summed)
    landed = np.where(alone, alone_landed, landed)
    reduced, at_end = np.where(alone, alone_reduced, reduced), np.where(alone, alone_reduced, at_end)
    copied, reducing, gathered, gathered_loss, gathered_reduced = (
        np.where(alone, 0.0, size) for size in (copied, reducing, gathered, gathered_loss, gathered_reduced)
    )

    once = tokens * (num_dense * of_dense.kept + num_moe * of_moe.kept)
    stream = value * tokens * shape.hidden / tp
    streams = np.broadcast_to(stream, rank.shape)
    logits, head_activations = _head(
        shape, tp, tokens, value, head, np.array([head_chunk_bytes(layout) for layout in layouts])
    )
    logits, head_activations = np.where(predicts, logits, 0.0), np.where(predicts, head_activations, 0.0)
    boundary = np.where(pp > 1, 4.0 * stream, 0.0)
    work_tokens = tokens * (layer.again + layer.work)
    in_work = work_tokens + layer.work_bytes * trained_largest.whole / largest.whole

    nothing = np.zeros(rank.shape)
    forward = MomentBytes(summed + copied, once, nothing)
    # The backward pass of the first layer; the reduction of its gradients, after its activations are freed; or the
    # backward pass of the second layer during the reduction of the first.
    without = once - tokens * layer.kept
    first, gathered_backward = _largest_of(
        (MomentBytes(summed + copied + head, once, in_work), gathered),
        (MomentBytes(summed + head + (value + reducing) * of_group, without, streams), gathered_reduced),
        (MomentBytes(summed + head + reducing * of_group, without, in_work), gathered),
    )
    later = MomentBytes(landed + reduced, nothing, streams)
    if (is_pipeline := pp > 1).any():
        late = tokens * (num_dense * of_dense.late + num_moe * of_moe.late)
        is_zero_bubble = at.schedule == "zero-bubble"
        chunk = ChunkBytes(
            layers=np.maximum(1.0, (num_dense + num_moe) / vpp),
            kept=once / vpp,
            late=late / vpp,
            in_work=np.where(is_zero_bubble, work_tokens, in_work),
            stream=streams,
            gradients=value * trained_of_layers / vpp,
            group=value * of_group,
            tables=value * of_tables,
            head=head,
            landed=landed,
            widened=np.broadcast_to(width / value, rank.shape),
            has_late=np.broadcast_to(is_zero_bubble * 1.0, rank.shape),
        )
        columns = (
            np.broadcast_to(column, rank.shape)[:, is_pipeline].ravel()
            for column in (at.schedule, pp, vpp, micro_batches, rank)
        )
        ranks = list(zip(*(column.tolist() for column in columns), strict=True))
        peaks = pipeline_moments(ranks, ChunkBytes(*(column[:, is_pipeline].ravel() for column in chunk)))
        forward, first, later = (
            _with_pipelines(moment, is_pipeline, peak)
            for moment, peak in zip((forward, first, later), peaks, strict=True)
        )
        gathered_backward = np.where(is_pipeline, gathered, gathered_backward)
    # one layer in transfer, one being computed
    limit = np.where(at.offload == "activations", 2.0 * tokens * layer.kept, np.inf)
    forward, first, later = (
        moment._replace(activations=np.minimum(moment.activations, limit)) for moment in (forward, first, later)
    )
    sizes = StageBytes(
        parameters=weight_bytes * own,
        optimizer=optimizer,
        runtime=runtime,
        gradients=later.gradients,
        gradients_forward=forward.gradients,
        gradients_backward=first.gradients,
        gradients_step=landed,
        activations=forward.activations,
        first_activations=first.activations,
        later_activations=later.activations,
        head_activations=head_activations,
        logits=logits,
        unsharded=gathered,
        unsharded_loss=gathered_loss,
        unsharded_backward=gathered_backward,
        layer_in_work=first.in_work,
        later_in_work=later.in_work,
        buffers=boundary + tokens * layer.forward,
        buffers_backward=boundary,
        temporaries=np.maximum(0.0, at_end),
    )
    whole = StageBytes(*(np.broadcast_to(size // 1.0, rank.shape) for size in sizes))
    return whole._replace(runtime=np.broadcast_to(runtime, rank.shape))


class _Numbers(NamedTuple):
    """Parameter counts of one layer or of the tables."""

    whole: Array  # before sharding
    group: Array  # of its largest FSDP group
    shard: Array


@lru_cache(maxsize=4096)
def _held(shape: ModelShape, traits: Traits, lora_rank: int, fsdp: int, cp: int, tp: int, ep: int) -> Array:
    """Return [parts, numbers] of a rank at any place of a pipeline: dense layer, layer with experts, tables by `ENDS`;
    then those that are trained, the adapters if there are any, and nothing of the tables."""
    layout = Layout(fsdp=fsdp, cp=cp, tp=tp, ep=ep)

    def numbers(weights: tuple[Weight, ...]) -> tuple[float, float, float]:
        rest, experts = total_size(weights, experts=False), total_size(weights, experts=True)
        shard = padded_size(weights, layout, traits, experts=False) / shards_of(layout, traits)
        shard += padded_size(weights, layout, traits, experts=True) / expert_shards_of(layout, traits)
        has_own_group = ep * tp > 1
        return rest + experts, max(rest, experts) if has_own_group else rest + experts, shard

    of_layers = [layer_weights(shape, tp, ep, moe=moe) for moe in (False, shape.is_moe)]
    tables = [numbers(table_weights(shape, tp, embeds=embeds, predicts=predicts)) for embeds, predicts in ENDS]
    if not lora_rank:
        whole = [*map(numbers, of_layers), *tables]
        return np.array([*whole, *whole])
    adapters = [tuple(item for pair in adapter_weights(weights, lora_rank) for item in pair) for weights in of_layers]
    both = [numbers((*weights, *added)) for weights, added in zip(of_layers, adapters, strict=True)]
    return np.array([*both, *tables, *map(numbers, adapters), *[numbers(())] * len(ENDS)])


Texts = NDArray[np.str_]


class _Columns(NamedTuple):
    """Fields of layouts: [layouts]."""

    pp: Array
    fsdp: Array
    cp: Array
    tp: Array
    ep: Array
    vpp: Array
    micro_batch: Array
    zero: Array
    data_parallel: Array
    world: Array
    precision: Texts
    recompute: Texts
    schedule: Texts
    offload: Texts


def _columns(layouts: Sequence[Layout]) -> _Columns:
    return _Columns(*(np.array([getattr(layout, name) for layout in layouts]) for name in _Columns._fields))


def _gathered(columns: Sequence[Array | Texts], row: Callable[..., Any]) -> Array:
    """Return row(values of the columns) of every position, evaluated once for equal values: [..., fields]."""
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    keys = list(zip(*(np.broadcast_to(column, shape).ravel().tolist() for column in columns), strict=True))
    positions = {key: position for position, key in enumerate(dict.fromkeys(keys))}
    index = [positions[key] for key in keys]
    rows = np.array([row(*key) for key in positions], dtype=np.float64)
    return rows[index].reshape(*shape, *rows.shape[1:])


def _largest_of(*moments: tuple[MomentBytes, Array]) -> tuple[MomentBytes, Array]:
    """Return the first largest of moments with their gathered weights."""
    (best, best_gathered), *others = moments
    for moment, gathered in others:
        is_larger = _total(moment) + gathered > _total(best) + best_gathered
        best = MomentBytes(*(np.where(is_larger, its, kept) for its, kept in zip(moment, best, strict=True)))
        best_gathered = np.where(is_larger, gathered, best_gathered)
    return best, best_gathered


def _with_pipelines(moment: MomentBytes, is_pipeline: NDArray[np.bool_], peak: MomentBytes) -> MomentBytes:
    """Return the moment, with those of layouts with a pipeline in its place."""
    sizes = [column.copy() for column in moment]
    for column, of_pipelines in zip(sizes, peak, strict=True):
        column[:, is_pipeline] = of_pipelines.reshape(len(column), -1)
    return MomentBytes(*sizes)


def _total(moment: MomentBytes) -> Array:
    return moment.gradients + moment.activations + moment.in_work


@lru_cache(maxsize=4096)
def _layer_counts(layers: int, dense_layers: int, pp: int, vpp: int, rank: int) -> tuple[int, int]:
    """Return (dense layers, layers with experts) of a pipeline rank; the `dense_layers` come first."""
    stages = stage_layers(layers, pp, vpp)[rank::pp]
    num_dense = sum(max(0, min(stage.stop, dense_layers) - stage.start) for stage in stages)
    return num_dense, sum(len(stage) for stage in stages) - num_dense


def _head(
    shape: ModelShape, tp: Array, tokens: Array, value: Array, head: Array, largest: Array
) -> tuple[Array, Array]:
    """Return (logits with their gradients, input and output of the last norm). Vocabulary-parallel logits have a copy
    in fp32 and one at the end; the head's gradient exists from the second chunk on. `largest`: bytes of a chunk."""
    of_all = value * tokens * shape.vocab / tp
    chunk = np.minimum(of_all, largest)
    stream, whole = value * tokens * shape.hidden / tp, value * tokens * shape.hidden
    copies = chunk * (1.0 + (FP32 + value) / value)
    logits = np.where(of_all <= largest, np.maximum(copies, chunk + head), copies + head)
    is_whole = tp == 1
    return np.where(is_whole, chunk + head, logits) + whole, 2.0 * stream + np.where(is_whole, 0.0, whole)
