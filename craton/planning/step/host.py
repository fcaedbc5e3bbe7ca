"""Host time of an eager step on a GPU: a rank that launches kernels one by one is never faster than its Python thread.

Costs are in units of one operation of a forward pass on a tiny CPU tensor, which is measured on the host
(`Gpu.operation_seconds`). They are those of steps of a decoder with hidden size 256 and `graphs: off`, whose kernels
take almost no time: 2 and 8 layers, 1 and 4 micro-batches, on two hosts with an H200, torch 2.11.0, 2026-11-18. With
7.0 µs per operation a layer takes 2.4 ms there, the rest of a micro-batch 2.5 ms.
"""

from __future__ import annotations

from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.software import Traits
from craton.planning.step.operations import repeated

LAYER_FORWARD, LAYER_BACKWARD = 163.0, 203.0  # per micro-batch
FORWARD_SHARE = LAYER_FORWARD / (LAYER_FORWARD + LAYER_BACKWARD)
ENDS = 376.0  # embedding, rotary tables, last norm, head and loss: per micro-batch
UPDATE_OF_LAYER = 63.0  # clipping and optimizer: per step
STEP = 268.0  # loop, loader and records: per step
EXPERTS = 60.0  # router, permutation and combination, in place of the dense MLP: per micro-batch, assumed
ADAPTERS = 150.0  # of one layer: per micro-batch, assumed
SHARDED_LAYER = 75.0  # FSDP2's hooks: per micro-batch; compute phase of two ranks that share a GPU
TENSOR_PARALLEL = 120.0  # of a layer: per micro-batch; counted on a CPU
SELECTIVE = 780.0  # of a layer: per micro-batch, every operation passes a Python function that may keep its result
FULL = 430.0  # of a layer: per micro-batch, the forward pass again


def launches_eagerly(layout: Layout, traits: Traits, graphs: bool) -> bool:
    """Whether ranks launch their kernels from Python: those of other stacks, and several of Craton's training loop."""
    return not traits.own_layers or layout.world > 1 or not graphs


def forward_seconds(num_layers: float, operation_seconds: float) -> float:
    """Return the host time of the forward pass of one micro-batch."""
    return (num_layers * LAYER_FORWARD + ENDS * FORWARD_SHARE) * operation_seconds


def host_seconds(
    shape: ModelShape,
    layout: Layout,
    traits: Traits,
    num_layers: float,
    micro_batches: float,
    *,
    lora: bool,
    operation_seconds: float,
) -> float:
    """Return the host time of one step of a pipeline rank with `num_layers` layers."""
    layer = LAYER_FORWARD + LAYER_BACKWARD
    if not traits.own_layers:
        layer += LAYER_FORWARD * repeated(layout, traits).elements
    elif layout.recompute == "full":
        layer += FULL
    elif layout.recompute == "selective":
        layer += SELECTIVE
    if shape.is_moe:
        layer += EXPERTS
    if lora:
        layer += ADAPTERS
    if layout.world > 1 and (traits.own_layers or layout.zero == 3):
        layer += SHARDED_LAYER
    if layout.tp > 1 and traits.own_layers:
        layer += TENSOR_PARALLEL
    operations = micro_batches * (num_layers * layer + ENDS) + num_layers * UPDATE_OF_LAYER + STEP
    return operations * operation_seconds
