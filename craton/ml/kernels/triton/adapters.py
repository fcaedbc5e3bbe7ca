"""Triton: LoRA adapters for a few tokens, each with its own adapter: two short kernels that read only those in use.

The first multiplies a token with its A, one program per row of A. The second adds the product with B to the output. A
token without an adapter costs only the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

COLUMNS, OUTS = 1024, 64  # of a tile of A, of a program with B


@triton.jit
def _narrow(
    x,
    a,
    slots,
    narrow,
    columns,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    line, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_inputs(EARLY)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = ((line // RANK * SLOTS + slot) * RANK + line % RANK).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, columns, COLUMNS):
            here = start + column < columns
            value = tl.load(x + token * columns + start + column, mask=here, other=0.0).to(tl.float32)
            total += value * tl.load(a + row * columns + start + column, mask=here, other=0.0).to(tl.float32)
        tl.store(narrow + token * tl.num_programs(0) + line, tl.sum(total, 0))


@triton.jit(do_not_specialize=["outs"])
def _widen(
    out,
    b,
    slots,
    narrow,
    outs,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    OUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    live = index < outs
    wait_for_inputs(EARLY)
    slot = tl.load(slots + token)
    if slot >= 0:
        rank = tl.arange(0, PADDED)
        there = rank < RANK
        total = tl.zeros([OUTS], tl.float32)
        for part in tl.static_range(PARTS):
            value = tl.load(narrow + (token * PARTS + part) * RANK + rank, mask=there, other=0.0)
            place = index.to(tl.int64)[:, None] * (PARTS * SLOTS * RANK) + (part * SLOTS + slot) * RANK + rank[None, :]
            tile = tl.load(b + place, mask=live[:, None] & there[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tile * value[None, :], 1)
        target = out + token * outs + index
        tl.store(target, (tl.load(target, mask=live).to(tl.float32) + total).to(out.dtype.element_ty), mask=live)


def add_adapters(out: Tensor, x: Tensor, a: Tensor, b: Tensor, of_tokens: Tensor, slots: int, rank: int) -> Tensor:
    """As craton.ml.kernels.serving.paged has it."""
    assert x.is_contiguous()
    assert out.is_contiguous()
    tokens, columns = x.shape
    outs, width = b.shape
    parts = width // (slots * rank)
    narrow = torch.empty(tokens, parts * rank, dtype=torch.float32, device=x.device)
    options = {"SLOTS": slots, "RANK": rank, **launch_options(x)}
    _narrow[(parts * rank, tokens)](x, a, of_tokens, narrow, columns, COLUMNS=COLUMNS, **options)
    _widen[(triton.cdiv(outs, OUTS), tokens)](
        out, b, of_tokens, narrow, outs, PARTS=parts, PADDED=triton.next_power_of_2(rank), OUTS=OUTS, **options
    )
    return out
