"""Triton: the matmul of some rows with a 4-bit weight by the tensor cores.

One mask gives two columns, as the low mantissa bits of two bf16 numbers from 128 to 143 (fp16: from 1024): integers
without a conversion, from which 128 + zero point is subtracted, both exactly, in the registers of Hopper's warp groups.
Sums are fp32, and the scale of a group is applied to its sum, so that no weight is rounded. The rows are the columns of
the tensor cores' tile. The inputs may be split over programs, whose fp32 sums a second kernel adds, in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from craton.ml.kernels.triton.launch import wait_for_inputs


@triton.jit(do_not_specialize=["rows", "outs", "splits"])
def many(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    rows,
    columns,
    outs,
    splits,
    ZEROED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BASE: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    units, groups = tl.cdiv(columns, 128), columns // GROUP
    share = tl.cdiv(units, splits)
    first = tl.program_id(2) * share
    known = (index % outs).to(tl.int64)
    word = tl.arange(0, 16)
    place = known[:, None] * (units * 16) + word[None, :]
    of_x = (row % rows)[:, None] * columns + word[None, :]
    wait_for_inputs(EARLY)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for unit in range(first, tl.minimum(first + share, units)):
        tile = tl.load(words + place + unit * 16)
        for piece in tl.static_range(8):
            column = unit * 128 + piece * 16
            value = tl.load(x + of_x + column, mask=EVEN | (column + word < columns)[None, :], other=0.0)
            if piece % PIECES == 0:
                group = known * groups + tl.minimum(column, columns - 1) // GROUP
                by = tl.load(scale + group).to(tl.float32)[:, None]
                if ZEROED:
                    bits = tl.load(zero + group).to(tl.int16) | BITS
                    point = bits.to(x.dtype.element_ty, bitcast=True)[:, None]
                else:
                    point = tl.full([1, 1], BASE + 8, x.dtype.element_ty)
                sums = tl.zeros([OUTS, ROWS], tl.float32)
            bits = ((tile >> (4 * (piece % 4))) & 0x000F000F) | (BITS * 0x10001)
            if piece >= 4:
                bits = bits >> 16
            weight = bits.to(tl.int16).to(x.dtype.element_ty, bitcast=True) - point
            sums = tl.dot(weight, tl.trans(value), sums)
            if piece % PIECES == PIECES - 1:
                total += sums * by
    live = (index < outs)[:, None] & (row < rows)[None, :]
    if BIASED and not SPLIT:
        total += tl.load(bias + index, mask=index < outs, other=0.0).to(tl.float32)[:, None]
    to = (tl.program_id(2) * rows + row)[None, :].to(tl.int64) * outs + index[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "outs", "splits"])
def add_splits(partial, bias, out, rows, outs, splits, BIASED: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    place = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    live = place < rows * outs
    total = tl.zeros([SUMS], tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * rows * outs + place, mask=live, other=0.0)
    if BIASED:
        total += tl.load(bias + place % outs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live)
