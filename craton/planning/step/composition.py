"""Compose the terms of a training step into seconds, given the constants of a software stack (`compose`).

The terms need no software constant and the composition needs no shape, so a fit evaluates the first once per run and
the second thousands of times. All parts are exposed seconds and add up to `step_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from craton.planning.fitting import Array, Composition
from craton.planning.software import SPREAD
from craton.planning.step.compute import LayerTerms

EARLY_BACKWARD = 0.85  # share of the last backward pass behind which gradients can be reduced
OVERLAP_SHARPNESS = 4.0


@dataclass(frozen=True, slots=True)
class StepTerms:
    """The terms of one step that do not depend on software constants. Per micro-batch unless stated otherwise."""

    layer: LayerTerms  # the mean layer of the model
    head: LayerTerms
    num_layers: float  # multi-token-prediction layers included
    num_heads: float  # head passes: 1 plus one per multi-token-prediction layer
    full_layers: float  # layers of the fullest pipeline rank
    full_heads: float
    pp: int
    vpp: int
    micro_batches: float
    bubble_factor: float
    send_seconds: float  # one activation to the next stage
    sends: float  # exposed sends per micro-batch
    fsdp_passes: tuple[float, float, float]  # gathers forward, gathers backward, scatters: per micro-batch
    table_gathers: float  # of embedding, last norm and head: per micro-batch
    layer_shard: tuple[float, float]  # FSDP: all-gather of a layer's weights, reduce-scatter of its gradients, once
    head_shard: tuple[float, float]  # the same for embedding, last norm and head, gathered forward only
    first_gather_seconds: float  # the first gather of a forward pass, always exposed
    once_gather_seconds: float  # per step: parameters after a sharded optimizer step
    once_reduce_seconds: float  # per step: gradients
    optimizer_seconds: float  # minimum traffic
    offload_once_seconds: float  # per step: gradients to the host, its optimizer, weights back
    offload_layer_seconds: float  # one layer's activations to the host, or back
    gemm_index: int  # which efficiency constant the layer matmuls use
    repeated: tuple[float, ...]  # recomputed shares of the forward pass: `operations.Repeated`
    gradient_overlap: float  # 1 or 0
    overlap: float  # 0 if the same cores compute and communicate (CPU): nothing is hidden
    tensor_far: float  # 1: the group leaves its NVLink domain
    context_far: float
    exchange_far: float
    shard_far: float
    nodes_log2: float
    host_seconds: float = 0.0  # per step: the host's time to launch it, which bounds the step; 0: no bound
    host_forward_seconds: float = 0.0  # the same of the forward pass of one micro-batch
    head_launches: float = 0.0  # 1: launches of embedding, head and loss are exposed too, as on a CPU


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
    hidden: float  # communication hidden behind compute: not part of the step

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


def compose(terms: StepTerms, constants: Array) -> StepTimes:
    """Return the exposed seconds of a step, given the constants of a software profile in the order of `software.NAMES`.

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

    products, attention, elements, collectives, sums = terms.repeated
    again = products * (gemm_f + expert_f + dispatch_f) + attention * attention_f
    again = again + elements * (element_f + permute_f + host_f) + collectives * exchange_f
    again = again + np.maximum(attention, collectives) * context_f
    again = again + (collectives * (1.0 - layer.tensor_sums) + sums * layer.tensor_sums) * tensor_f
    again = recompute_cost * again

    head_f = head.gemm[0] / gemm_efficiency + head.elementwise[0] * elementwise_passes + head.tensor[0] * tensor_scale
    head_b = head.gemm[1] / gemm_efficiency + head.elementwise[1] * elementwise_passes + head.tensor[1] * tensor_scale

    head_f = head_f + terms.head_launches * head.kernels[0] * launch_seconds
    head_b = head_b + terms.head_launches * head.kernels[1] * launch_seconds

    layer_f = gemm_f + expert_f + attention_f + element_f + permute_f + host_f + dispatch_f
    layer_f = layer_f + tensor_f + context_f + exchange_f
    layer_b = gemm_b + expert_b + attention_b + element_b + permute_b + host_b + dispatch_b
    layer_b = layer_b + tensor_b + context_b + exchange_b + again

    mean = (terms.num_layers * (layer_f + layer_b) + terms.num_heads * (head_f + head_b)) / terms.pp

    def rank(layers: Any, heads: Any) -> StepTimes:
        """Return the step if all ranks wait for a pipeline rank with these layers and heads."""
        # Compute that already hides a ring hides nothing else, so that a faster GPU never makes a step slower.
        window_f = layers * (layer_f - covered_f) + heads * head_f
        window_b = layers * (layer_b - covered_b) + heads * head_b

        # Sharded weights: gathers are prefetched, reductions run behind; the first gather is exposed.
        shard_scale = slowdown(terms.shard_far)
        gathers_f, gathers_b, scatters = terms.fsdp_passes
        tables = heads / terms.num_heads
        gather, gather_tables = shard_scale * layers * terms.layer_shard[0], shard_scale * tables * terms.head_shard[0]
        scatter = shard_scale * (layers * terms.layer_shard[1] + tables * terms.head_shard[1])
        wire_f = gathers_f * gather + terms.table_gathers * gather_tables
        wire_b = gathers_b * gather + scatters * scatter
        hidden_f, hidden_b = terms.overlap * _covered(wire_f, window_f), terms.overlap * _covered(wire_b, window_b)
        edge = shard_scale * (terms.table_gathers * terms.first_gather_seconds + scatters * terms.layer_shard[1])
        shard = wire_f + wire_b - (1.0 - contention) * (hidden_f + hidden_b)
        shard = shard + terms.overlap * _covered(edge, 0.5 * (wire_f + wire_b))

        # One reduction and one gather per step, hidden behind the last backward and the first forward pass.
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
        waiting = np.maximum(terms.host_seconds - base, 0.0)  # the device waits for launches
        return StepTimes(
            gemm=repeat * (gemm_f + gemm_b),
            experts=repeat * (expert_f + expert_b),
            attention=repeat * (attention_f + attention_b),
            elementwise=repeat * (element_f + element_b),
            permute=repeat * (permute_f + permute_b),
            dispatch=repeat * (dispatch_f + dispatch_b),
            head=count * heads * (head_f + head_b),
            recompute=repeat * again,
            host=repeat * (host_f + host_b) + waiting,
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

    # All ranks wait for the one with the most layers, or for an even share of layers and heads if that takes longer.
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
    """Stack many steps into one object whose fields are arrays, for `compose`."""
    columns: dict[str, Any] = {}
    for field in fields(StepTerms):
        values = [getattr(step, field.name) for step in steps]
        columns[field.name] = _stack_layers(values) if isinstance(values[0], LayerTerms) else _column(values)
    return StepTerms(**columns)


def _step_seconds(terms: StepTerms, constants: Array) -> Array:
    return np.asarray(compose(terms, constants).step_seconds)


TRAINING_STEP = Composition(stack, _step_seconds, SPREAD)


def _stack_layers(layers: list[LayerTerms]) -> LayerTerms:
    """Stack layers; layouts with the same operator split share one object, so only distinct ones are converted."""
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
    """Return the part of a transfer that compute can hide: a smooth minimum of both, because layers differ and no
    schedule overlaps them perfectly."""
    large = np.maximum(np.maximum(wire, compute), 1e-12)
    small = np.minimum(wire, compute)
    return small / (1.0 + (small / large) ** OVERLAP_SHARPNESS) ** (1.0 / OVERLAP_SHARPNESS)
