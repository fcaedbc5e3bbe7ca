"""Triton: silu(gate) · up, and its backward pass in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8


@triton.jit
def _forward(gate, up, product, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    value = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + offsets, (value * tl.sigmoid(value) * other).to(product.dtype.element_ty), mask=mask)


@triton.jit
def _backward(gate, up, gradient, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    value = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(value)
    silu = value * sigmoid
    tl.store(gradient + offsets, (silu * other).to(gradient.dtype.element_ty), mask=mask)
    tl.store(up + offsets, (slope * silu).to(up.dtype.element_ty), mask=mask)
    grad_gate = slope * other * sigmoid * (1.0 + value * (1.0 - sigmoid))
    tl.store(gate + offsets, grad_gate.to(gate.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    product = torch.empty_like(gate)
    count = gate.numel()
    _forward[(triton.cdiv(count, BLOCK),)](gate, up, product, count, BLOCK=BLOCK, num_warps=WARPS)
    return product


def swiglu_backward_(gate: Tensor, up: Tensor, gradient: Tensor) -> None:
    """In place: gate and up become their gradients, `gradient` becomes the forward product."""
    count = gate.numel()
    _backward[(triton.cdiv(count, BLOCK),)](gate, up, gradient, count, BLOCK=BLOCK, num_warps=WARPS)
