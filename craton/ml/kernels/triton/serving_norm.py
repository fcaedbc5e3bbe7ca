"""Triton: residual addition and root-mean-square norm in one pass, without what a backward pass would need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs
from craton.ml.kernels.triton.norm import warps


@triton.jit
def _add_norm(
    x, delta, weight, total, normed, columns, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    gain = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    value = tl.load(x + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * columns + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    tl.store(normed + row * columns + offsets, (value * inverse * gain).to(normed.dtype.element_ty), mask=mask)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, norm of it); without delta the sum is x itself."""
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    columns = x.shape[-1]
    block = triton.next_power_of_2(columns)
    _add_norm[(x.numel() // columns,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        normed,
        columns,
        epsilon,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=warps(block),
        **launch_options(x),
    )
    return total, normed
