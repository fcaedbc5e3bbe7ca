"""Memory of one GPU during a training step, at the instants that can be the peak, on the worst pipeline rank.

Every part is a whole number of bytes, so parts add up exactly; the total is the largest of the instants, never the sum
of everything. `footprint` counts tensors one by one; the CUDA context, NCCL's buffers and allocator fragmentation are
the named constants below, each with its source. docs/memory.md compares the result with published peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from craton.job.layout import Layout
from craton.planning.memory.footprint import (
    BUCKET_PARAMETERS,
    MASTER_BYTES,
    MOMENT_BYTES,
    StageBytes,
    layer_bytes,
    parameter_bytes,
)
from craton.planning.memory.own_memory import own_stages
from craton.planning.memory.own_pipeline import Array
from craton.planning.software import Traits
from craton.planning.step import HEAD_CHUNK_BYTES, Workload, trained_share

GIBIBYTE = 2.0**30
# CUDA context, cuBLAS workspaces and framework before the first collective: 1.06 GB on H100 (NVIDIA/nccl#1685).
CONTEXT_BYTES = 1.0 * GIBIBYTE
# Python, torch and the loop in a rank without a GPU: 0.6 to 0.7 GiB resident on top of the tensors, torch 2.13.0.
PROCESS_BYTES = 0.65 * GIBIBYTE
# NCCL's buffers grow with communicators and channels (NVIDIA/nccl#864, #986); a multi-node communicator also has
# network buffers.
COMMUNICATOR_BYTES = 0.2 * GIBIBYTE
NETWORK_COMMUNICATOR_BYTES = 0.4 * GIBIBYTE
# Peak reserved over peak allocated in nanotron's logs (huggingface.co/nanotron/old_bench): 1.01 to 1.07.
ALLOCATOR_SLACK = 0.04

SAVED_LOGIT_BYTES = 4.0  # of a further head (multi-token prediction) until its backward pass

NUM_STAGES = 3  # pipeline ranks that can be the worst
INSTANTS = (
    "start of forward",
    "end of forward of the last micro-batch in flight",
    "loss",
    "first backward layer",
    "end of the first backward pass",
    "optimizer step",
)


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU with the highest peak."""

    total_bytes: float
    parts: dict[str, float]  # at the worst instant; add up to total_bytes
    instants: dict[str, float]  # each on the pipeline rank where it is worst; the largest is total_bytes


def memory(work: Workload, traits: Traits, node_gpus: int = 8) -> Memory:
    """Return the bytes at every instant of a step."""
    instants = dict.fromkeys(INSTANTS, 0.0)
    total_bytes, parts = 0.0, {}
    stages = _stages(work, [work.layout], traits, node_gpus)
    for numbers in zip(*(column[:, 0].tolist() for column in stages), strict=True):
        for instant, at_instant in _parts_by_instant(StageBytes(*numbers)).items():
            size = sum(at_instant.values())
            instants[instant] = max(instants[instant], size)
            if size > total_bytes:
                total_bytes, parts = size, at_instant
    return Memory(total_bytes, {name: size for name, size in parts.items() if size}, instants)


def memory_bytes(work: Workload, traits: Traits, node_gpus: int = 8) -> float:
    """Return the same total without names."""
    return float(memory_bytes_of(work, [work.layout], traits, node_gpus)[0])


def memory_bytes_of(work: Workload, layouts: Sequence[Layout], traits: Traits, node_gpus: int = 8) -> Array:
    """Return the total of the same work with each of many layouts, for a search: [layouts]."""
    if not layouts:
        return np.empty(0)
    stage = _stages(work, layouts, traits, node_gpus)
    at_loss = np.where(stage.logits != 0.0, stage.unsharded_loss + stage.head_activations + stage.logits, 0.0)
    forward = stage.activations + np.maximum(stage.unsharded + stage.buffers, at_loss)
    first = stage.first_activations + stage.unsharded_backward + stage.layer_in_work + stage.buffers_backward
    later = stage.later_activations + stage.unsharded_backward + stage.later_in_work + stage.buffers_backward
    sizes = (
        stage.gradients_forward + forward + forward * ALLOCATOR_SLACK // 1.0,
        stage.gradients_backward + first + first * ALLOCATOR_SLACK // 1.0,
        stage.gradients + later + later * ALLOCATOR_SLACK // 1.0,
        stage.gradients_step + stage.temporaries + stage.temporaries * ALLOCATOR_SLACK // 1.0,
    )
    totals = np.maximum.reduce(sizes) + stage.parameters + stage.optimizer + stage.runtime
    return np.asarray(totals.max(0))


def _parts_by_instant(stage: StageBytes) -> dict[str, dict[str, float]]:
    def parts(gradients: float, **dynamic: float) -> dict[str, float]:
        return {
            "parameters": stage.parameters,
            "gradients": gradients,
            "optimizer states": stage.optimizer,
            **{name.replace("_", " "): size for name, size in dynamic.items()},
            "allocator slack": sum(dynamic.values()) * ALLOCATOR_SLACK // 1.0,
            "runtime and communicators": stage.runtime,
        }

    backward = {"unsharded_parameters": stage.unsharded_backward, "communication_buffers": stage.buffers_backward}
    by_instant = (
        parts(stage.gradients_forward, unsharded_parameters=stage.unsharded),
        parts(
            stage.gradients_forward,
            activations=stage.activations,
            unsharded_parameters=stage.unsharded,
            communication_buffers=stage.buffers,
        ),
        parts(
            stage.gradients_forward,
            activations=stage.activations + stage.head_activations,
            logits=stage.logits,
            unsharded_parameters=stage.unsharded_loss,
        ),
        parts(
            stage.gradients_backward,
            activations=stage.first_activations,
            layer_in_work=stage.layer_in_work,
            **backward,
        ),
        parts(stage.gradients, activations=stage.later_activations, layer_in_work=stage.later_in_work, **backward),
        parts(stage.gradients_step, gradients_on_their_way=stage.temporaries),
    )
    named = dict(zip(INSTANTS, by_instant, strict=True))
    if not stage.logits:
        del named["loss"]
    return named


def _stages(work: Workload, layouts: Sequence[Layout], traits: Traits, node_gpus: int) -> StageBytes:
    """Return the bytes of the pipeline ranks that can be the worst: [ranks, layouts]. A rank may repeat."""
    runtime = [
        PROCESS_BYTES
        if work.on_cpu
        else _runtime_bytes(layout, node_gpus, layout.ep * (1 if work.adjacent_experts else layout.tp))
        for layout in layouts
    ]
    if traits.own_layers:
        return own_stages(work, layouts, traits, np.array(runtime))
    rows = [
        _stages_of(replace(work, layout=layout), traits, size) for layout, size in zip(layouts, runtime, strict=True)
    ]
    return StageBytes(*np.array(rows).transpose(2, 1, 0))


def _stages_of(work: Workload, traits: Traits, runtime: float) -> list[StageBytes]:
    """Return the first pipeline rank, the second if leading layers differ, and the last, which may repeat."""
    shape, layout = work.shape, work.layout
    pp, vpp = layout.pp, layout.vpp
    tokens = layout.micro_batch * work.sequence / layout.cp
    micro_batches = work.micro_batches
    rates = parameter_bytes(
        layout.precision,
        layout.zero,
        layout.pp > 1,
        layout.replicate > 1,
        layout.fsdp,
        layout.cp,
        layout.tp,
        layout.ep,
        trained_share(shape, work.adapter_rank),
        layout.offload == "optimizer",
        traits.master_gradients,
        work.weights,
    )
    dense, moe, head = layer_bytes(
        shape, traits, layout.tp, layout.ep, layout.precision, layout.recompute, work.sequence, work.imbalance
    )
    layers = shape.layers + shape.mtp_layers
    per_chunk = -(-layers // (pp * vpp))
    per_rank = min(per_chunk * vpp, layers)
    last = max(layers - (pp - 1) * per_rank, layers // pp)  # with uneven stages the rank with the head has fewer
    numbers = (0,) if pp == 1 else (0, 1, pp - 1) if pp > 2 and shape.dense_layers else (0, pp - 1)
    stages = []
    for number in numbers:
        is_last = number == pp - 1
        count = last if is_last else per_rank
        num_dense = count if not shape.is_moe else min(shape.dense_layers, per_chunk) if number == 0 else 0
        num_moe = count - num_dense
        layer = moe if num_moe else dense
        tables = head.tables_alone if pp == 1 else head.tables_last if is_last else 1.0 if number == 0 else 0.0

        in_flight = _in_flight(layout, micro_batches, number)
        once = tokens * (num_dense * dense.saved + num_moe * moe.saved)
        activations = in_flight * once
        later = (in_flight - 1.0) * once + tokens * layer.kept
        if layout.offload == "activations":  # one layer in transfer, one being computed
            two_layers = 2.0 * tokens * layer.saved
            activations, later = min(activations, two_layers), min(later, two_layers)
        logits = 0.0
        if is_last:
            values = tokens * head.width
            if traits.chunked_head:
                value = 4.0 if layout.precision == "fp32" else 2.0
                logits = min(value * values, HEAD_CHUNK_BYTES) + value * (head.parameters + tokens * shape.hidden)
            else:
                logits = values * (head.logit_bytes + shape.mtp_layers * SAVED_LOGIT_BYTES)

        table = tables * head.parameters
        body = num_dense * dense.parameters + num_moe * moe.parameters
        experts = num_moe * moe.expert_parameters
        shared, inner, full = table + body, body + experts, table + body + experts
        largest = layer.parameters + layer.expert_parameters
        gradients = rates.gradient * shared + rates.expert_gradient * experts
        held = rates.keeps_gradients or micro_batches > in_flight
        early = gradients if held else min(gradients, rates.gradient * (table if rates.reduced else table + largest))
        unsharded = rates.gathered_table * table + rates.gathered * inner + rates.fetched * largest
        buffers = tokens * (layer.buffers + (layer.ring if layout.cp > 1 else 0.0))
        buffers += 2.0 * rates.bucket * min(BUCKET_PARAMETERS, full) + (tokens * head.sends if pp > 1 else 0.0)
        optimizer = rates.optimizer * shared + rates.expert_optimizer * experts
        temporaries = rates.temporary * shared + rates.expert_temporary * experts
        if layout.offload == "optimizer":  # gradients to the host and weights back, bucket by bucket
            optimizer = min(optimizer, 2.0 * BUCKET_PARAMETERS * (MASTER_BYTES + MOMENT_BYTES))
        unsharded_backward = unsharded + rates.summed * full + rates.reduced * largest
        stages.append(
            StageBytes(
                parameters=(rates.table * table + rates.weight * body + rates.expert_weight * experts) // 1.0,
                optimizer=optimizer // 1.0,
                runtime=runtime,
                gradients=gradients // 1.0,
                gradients_forward=gradients // 1.0 if held else 0.0,
                gradients_backward=early // 1.0,
                gradients_step=gradients // 1.0,
                activations=activations // 1.0,
                first_activations=activations // 1.0,
                later_activations=later // 1.0,
                head_activations=tokens * head.saved // 1.0,
                logits=logits // 1.0,
                unsharded=unsharded // 1.0,
                unsharded_loss=unsharded // 1.0,
                unsharded_backward=unsharded_backward // 1.0,
                layer_in_work=tokens * layer.work // 1.0,
                later_in_work=tokens * layer.work // 1.0,
                buffers=buffers // 1.0,
                buffers_backward=buffers // 1.0,
                temporaries=temporaries // 1.0,
            )
        )
    return [*stages, *[stages[-1]] * (NUM_STAGES - len(stages))]


def _in_flight(layout: Layout, micro_batches: int, number: int) -> float:
    """Return the micro-batches whose activations are alive, in units of all layers of this pipeline rank."""
    pp, vpp = layout.pp, layout.vpp
    if pp == 1:
        return 1.0
    if layout.schedule == "zero-bubble":  # inputs wait for the weight gradients (ZB-H1, arXiv:2401.10241)
        return min(micro_batches, pp)
    if vpp > 1:  # rank 0 holds 1 + (pp - 1)/(pp · vpp) times pp micro-batches (arXiv:2205.05198)
        return min(micro_batches * vpp, 2 * (pp - number - 1) + (vpp - 1) * pp + 1) / vpp
    return min(micro_batches, pp - number)


def _runtime_bytes(layout: Layout, node_gpus: int, expert_span: int) -> float:
    """Return CUDA context and NCCL's buffers: a communicator per mesh dimension, and two for experts."""
    inside = outside = 0
    span = 1
    for size in (layout.tp, layout.cp, layout.fsdp, layout.replicate, layout.pp):
        if size > 1:
            span *= size
            if span <= node_gpus:
                inside += 1
            else:
                outside += 1
    if layout.ep > 1:
        if expert_span > node_gpus:
            outside += 2
        else:
            inside += 2
    return (CONTEXT_BYTES + inside * COMMUNICATOR_BYTES + outside * NETWORK_COMMUNICATOR_BYTES) // 1.0
