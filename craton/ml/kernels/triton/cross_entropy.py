"""Triton: log-probability of each label and, in place of the logits, the gradient of Σ coefficient · log p."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16
IGNORED = tl.constexpr(-100)


@triton.jit
def _log_probs(logits, labels, coefficients, log_probs, log_sums, columns, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * columns
    if label == IGNORED:
        tl.store(log_probs + row, 0.0)
        tl.store(log_sums + row, 0.0)
        if GRADIENT:
            for first in range(0, columns, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                tl.store(start + offsets, tl.zeros([BLOCK], logits.dtype.element_ty), mask=offsets < columns)
        return
    highest = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        value = tl.load(start + offsets, mask=offsets < columns, other=-float("inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(value, axis=0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(value - new_highest), axis=0)
        highest = new_highest
    log_sum = highest + tl.log(total)
    tl.store(log_probs + row, tl.load(start + label).to(tl.float32) - log_sum)
    tl.store(log_sums + row, log_sum)
    if GRADIENT:
        tl.debug_barrier()  # read the label's logit before it is overwritten
        coefficient = tl.load(coefficients + row)
        blocks = tl.cdiv(columns, BLOCK)
        for index in range(blocks):  # backwards: the cache has the end of the row
            offsets = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < columns
            value = tl.load(start + offsets, mask=mask, other=-float("inf")).to(tl.float32)
            hit = tl.where(offsets == label, 1.0, 0.0)
            slope = coefficient * (hit - tl.exp(value - log_sum))
            tl.store(start + offsets, slope.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _scale(tensor, factor, count, BLOCK: tl.constexpr):
    value = tl.load(factor).to(tl.float32)
    if value != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < count
        scaled = tl.load(tensor + offsets, mask=mask).to(tl.float32) * value
        tl.store(tensor + offsets, scaled.to(tensor.dtype.element_ty), mask=mask)


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor · factor in place; almost free if the factor, which only the device knows, is one."""
    count = tensor.numel()
    _scale[(triton.cdiv(count, BLOCK),)](tensor, factor, count, BLOCK=BLOCK, num_warps=8)
    return tensor


def log_probs_(logits: Tensor, labels: Tensor, coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-probabilities, log-sums) of rows of logits; with coefficients the logits become their own gradient."""
    rows, columns = logits.shape
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    log_sums = torch.empty_like(log_probs)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _log_probs[(rows,)](
        logits,
        labels,
        log_probs if coefficients is None else coefficients,
        log_probs,
        log_sums,
        columns,
        GRADIENT=coefficients is not None,
        BLOCK=block,
        num_warps=WARPS if block == BLOCK else max(1, block // 1024),
    )
    return log_probs, log_sums
