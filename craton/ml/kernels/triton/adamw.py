"""Triton: AdamW update of one tensor in one pass, with stochastic rounding if weights and states are bf16.

Rounding takes 16 random bits per stored number from a counter-based hash of (seed, index), so an update can be repeated
exactly. `control` holds what the host does not know yet: [gradient multiplier, 1 when finite else 0].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 512, 4  # 4.16 TB/s on an H200, larger blocks 3.5 to 4.1


@triton.jit
def _hash(x):
    """A 32-bit integer hash whose output bits are unbiased (lowbias32, by search of C. Wellons, 2018)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _round(value, bits):
    """fp32 → bf16, rounded up with the probability of the truncated part: add 16 random bits below the last kept
    bit."""
    raw = value.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
    return (raw & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["seed"])
def _update(
    parameter,
    gradient,
    average,
    square,
    master,
    control,
    count,
    learning_rate,
    decay,
    beta1,
    beta2,
    correction1,
    correction2,
    epsilon,
    seed,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    slope = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(control)
    first = tl.load(average + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(square + offsets, mask=mask, other=0.0).to(tl.float32)
    if MASTER:
        weight = tl.load(master + offsets, mask=mask, other=0.0)
    else:
        weight = tl.load(parameter + offsets, mask=mask, other=0.0).to(tl.float32)
    first += (slope - first) * (1.0 - beta1)
    second += (slope * slope - second) * (1.0 - beta2)
    weight *= 1.0 - learning_rate * decay
    weight -= learning_rate * (first / correction1) / (tl.sqrt(second / correction2) + epsilon)
    mask = offsets < tl.where(tl.load(control + 1) != 0.0, count, 0)  # loaded last, so that no other load waits for it
    if STOCHASTIC:
        bits = _hash(offsets.to(tl.uint32) ^ seed)
        more = _hash(bits + 0x9E3779B9)
        tl.store(parameter + offsets, _round(weight, bits), mask=mask)
        tl.store(average + offsets, _round(first, bits >> 16), mask=mask)
        tl.store(square + offsets, _round(second, more), mask=mask)
    else:
        if MASTER:
            tl.store(master + offsets, weight, mask=mask)
        tl.store(parameter + offsets, weight.to(parameter.dtype.element_ty), mask=mask)
        tl.store(average + offsets, first.to(average.dtype.element_ty), mask=mask)
        tl.store(square + offsets, second.to(square.dtype.element_ty), mask=mask)


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    master: Tensor | None,
    control: Tensor,
    learning_rate: float,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
    step: int,
    seed: int,
    stochastic: bool,
) -> None:
    """Update parameter, average, square and master in place; no change if control marks the step as not finite."""
    count = parameter.numel()
    _update[(triton.cdiv(count, BLOCK),)](
        parameter,
        gradient,
        average,
        square,
        parameter if master is None else master,
        control,
        count,
        learning_rate,
        decay,
        betas[0],
        betas[1],
        1.0 - betas[0] ** step,
        1.0 - betas[1] ** step,
        epsilon,
        seed & 0x7FFFFFFF,
        MASTER=master is not None,
        STOCHASTIC=stochastic,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
