"""Triton: residual addition and root-mean-square norm in one pass over memory, forward and backward. For serving there
is a forward pass that keeps nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

PROGRAMS_PER_PROCESSOR = 8  # of the backward pass: enough to hide latency, few enough to sum their partial weights


@triton.jit
def _forward(x, delta, weight, total, normed, scale, columns, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    value = tl.load(x + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * columns + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    tl.store(scale + row, inverse)
    gain = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * columns + offsets, (value * inverse * gain).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_normed,
    grad_total,
    total,
    scale,
    weight,
    grad_x,
    grad_weight,
    rows,
    columns,
    HAS_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_live = column < columns
    gain = tl.load(weight + column, mask=column_live, other=0.0).to(tl.float32)[None, :]
    gain_gradient = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        row_live = row < rows
        mask = row_live[:, None] & column_live[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        inverse = tl.load(scale + row, mask=row_live, other=0.0)[:, None]
        unit = tl.load(total + place, mask=mask, other=0.0).to(tl.float32) * inverse
        gradient = tl.load(grad_normed + place, mask=mask, other=0.0).to(tl.float32)
        if HAS_TOTAL:
            through = tl.load(grad_total + place, mask=mask, other=0.0).to(tl.float32)
        gain_gradient += tl.sum(gradient * unit, axis=0)
        gradient *= gain
        value = inverse * (gradient - unit * (tl.sum(gradient * unit, axis=1) / columns)[:, None])
        if HAS_TOTAL:
            value += through
        tl.store(grad_x + place, value.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_weight + program * columns + column, gain_gradient, mask=column_live)


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


def warps(block: int) -> int:
    """Number of warps for a program that holds a row."""
    return min(16, max(1, block // 512))


def backward_tile(block: int) -> tuple[int, int]:
    """Return how many rows a program of the backward pass has at a time, and its warps: the fastest on an H200 for rows
    of 768 to 4,096 (docs/measurements.md)."""
    if block <= 1024:
        return 4, 4
    return (4, 8) if block == 2048 else (1, min(16, block // 1024))


class AddNorm(torch.autograd.Function):
    """(x, delta, weight) → (x + delta, norm of it); without delta the sum is x itself."""

    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        columns = x.shape[-1]
        rows = x.numel() // columns
        x = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        total = x if delta is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(columns)
        _forward[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            normed,
            scale,
            columns,
            epsilon,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=warps(block),
        )
        ctx.save_for_backward(total, scale, weight)
        ctx.has_delta = delta is not None
        if delta is None:
            return x.view_as(x), normed
        return total, normed

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad_normed: Tensor):
        total, scale, weight = ctx.saved_tensors
        columns = total.shape[-1]
        rows = total.numel() // columns
        grad_normed = grad_normed.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x = torch.empty_like(total)
        processors = torch.cuda.get_device_properties(total.device).multi_processor_count if total.is_cuda else 1
        block = triton.next_power_of_2(columns)
        tile_rows, tile_warps = backward_tile(block)
        programs = min(triton.cdiv(rows, tile_rows), processors * PROGRAMS_PER_PROCESSOR)
        partial = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
        _backward[(programs,)](
            grad_normed,
            grad_normed if grad_total is None else grad_total,
            total,
            scale,
            weight,
            grad_x,
            partial,
            rows,
            columns,
            HAS_TOTAL=grad_total is not None,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=tile_warps,
        )
        grad_weight = partial.sum(0).to(weight.dtype)
        return grad_x, grad_x if ctx.has_delta else None, grad_weight, None


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
