"""Triton: matmuls of up to 64 rows with a 4-bit weight, and the weight of a layer as bf16 for more rows.

Each word holds eight columns of one output (see `craton.ml.kernels.serving.int4`). One mask gives two of them, as the
low mantissa bits of two bf16 numbers from 128 to 143 (fp16: from 1024): integers without a conversion, from which 128 +
zero point is subtracted, both exactly. The tensor cores multiply these integers. Sums are fp32, and the scale of a
group is applied to its sum, so that no weight is rounded. Up to 16 rows, each warp sums its own slice of the columns,
and every weight is unpacked once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

UNIT, WORDS = 128, 16  # columns that are packed together, and their words
# (rows, (outputs of a program, slices of 128 columns of a tile, warps, pipeline stages)), for up to so many rows
TILES = ((1, (16, 4, 4, 4)), (8, (32, 4, 4, 4)), (16, (32, 4, 4, 3)), (32, (64, 1, 4, 3)), (64, (64, 1, 4, 3)))
# The same for gate and up at once: half the outputs, because a program unpacks two weights.
GATED_TILES = ((1, (16, 4, 4, 4)), (16, (16, 4, 4, 3)))
MAX_ROWS, MAX_GATED_ROWS = TILES[-1][0], GATED_TILES[-1][0]
OUTS, UNITS = 16, 8  # of a program that unpacks a weight
ONES = {torch.bfloat16: (128, 0x4300), torch.float16: (1024, 0x6400)}  # the number whose last bit is 1, and its bits


@triton.jit
def _unpacked(words, zero, high_zero, PAIR: tl.constexpr, BITS: tl.constexpr):
    """Columns 16 · PAIR and 64 + 16 · PAIR of each unit, minus their zero points."""
    bits = ((words >> (4 * PAIR)) & 0x000F000F) | (BITS * 0x10001)
    low = bits.to(tl.int16).to(zero.dtype, bitcast=True) - zero
    return low, (bits >> 16).to(tl.int16).to(zero.dtype, bitcast=True) - high_zero


@triton.jit
def _zero_point(zero, place, live, x, ZEROED: tl.constexpr, BASE: tl.constexpr, BITS: tl.constexpr):
    """BASE + the zero point of each output in a group, in the dtype of x."""
    if ZEROED:
        bits = tl.load(zero + place, mask=live, other=0).to(tl.int16) | BITS
        point = bits.to(x.dtype.element_ty, bitcast=True)[:, :, None]
    else:
        point = tl.full([1, 1, 1], BASE + 8, x.dtype.element_ty)
    return point


@triton.jit
def _of_group(first, start, columns, GROUP: tl.constexpr):
    """The group of column `first + start`; of a column that is padding, the last group."""
    return tl.minimum(first + start, columns - 1) // GROUP


@triton.jit(do_not_specialize=["rows", "outs"])
def _few(
    x,
    words,
    scale,
    zero,
    other_words,
    other_scale,
    other_zero,
    bias,
    out,
    rows,
    columns,
    outs,
    GATED: tl.constexpr,
    ZEROED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTS: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    BASE: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    wait_for_inputs(EARLY)
    units, groups = tl.cdiv(columns, UNIT), columns // GROUP
    column = tl.arange(0, SLICES) * UNIT
    word = tl.arange(0, WORDS)
    row = tl.arange(0, ROWS)
    known = index % outs
    place = known.to(tl.int64)[None, :, None] * (units * WORDS)
    place += (tl.arange(0, SLICES) * WORDS)[:, None, None] + word[None, None, :]
    of_x = row[None, None, :] * columns + column[:, None, None] + word[None, :, None]
    is_row = (row < rows)[None, None, :]
    of_groups = known[None, :] * groups
    total = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    other_total = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    for start in range(0, columns, SLICES * UNIT):
        live = EVEN | (start + column < columns)
        tile = tl.load(
            words + place + start // UNIT * WORDS, mask=live[:, None, None], other=0, eviction_policy="evict_first"
        )
        if GATED:
            other_tile = tl.load(
                other_words + place + start // UNIT * WORDS,
                mask=live[:, None, None],
                other=0,
                eviction_policy="evict_first",
            )
        low = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
        high = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
        other_low = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
        other_high = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
        for pair in tl.static_range(4):
            near = start + WORDS * pair
            far = near + UNIT // 2
            here = EVEN | (near + column[:, None, None] + word[None, :, None] < columns)
            value = tl.load(x + of_x + near, mask=is_row & here, other=0.0)
            here = EVEN | (far + column[:, None, None] + word[None, :, None] < columns)
            high_value = tl.load(x + of_x + far, mask=is_row & here, other=0.0)
            if pair % PAIRS == 0:
                group = of_groups + _of_group(column, near, columns, GROUP)[:, None]
                high_group = of_groups + _of_group(column, far, columns, GROUP)[:, None]
                by = tl.load(scale + group, mask=live[:, None], other=0.0).to(tl.float32)[:, :, None]
                high_by = tl.load(scale + high_group, mask=live[:, None], other=0.0).to(tl.float32)[:, :, None]
                point = _zero_point(zero, group, live[:, None], x, ZEROED, BASE, BITS)
                high_point = _zero_point(zero, high_group, live[:, None], x, ZEROED, BASE, BITS)
                if GATED:
                    other_by = tl.load(other_scale + group, mask=live[:, None], other=0.0)
                    other_by = other_by.to(tl.float32)[:, :, None]
                    other_high_by = tl.load(other_scale + high_group, mask=live[:, None], other=0.0)
                    other_high_by = other_high_by.to(tl.float32)[:, :, None]
                    other_point = _zero_point(other_zero, group, live[:, None], x, ZEROED, BASE, BITS)
                    other_high_point = _zero_point(other_zero, high_group, live[:, None], x, ZEROED, BASE, BITS)
            near_weight, far_weight = _unpacked(tile, point, high_point, pair, BITS)
            low = tl.dot(near_weight, value, low)
            high = tl.dot(far_weight, high_value, high)
            if GATED:
                near_weight, far_weight = _unpacked(other_tile, other_point, other_high_point, pair, BITS)
                other_low = tl.dot(near_weight, value, other_low)
                other_high = tl.dot(far_weight, high_value, other_high)
            if pair % PAIRS == PAIRS - 1:
                total += low * by + high * high_by
                low = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
                high = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
                if GATED:
                    other_total += other_low * other_by + other_high * other_high_by
                    other_low = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
                    other_high = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    live = index < outs
    result = tl.sum(total, 0)
    if BIASED:
        result += tl.load(bias + index, mask=live, other=0.0).to(tl.float32)[:, None]
    if GATED:
        result = result / (1 + tl.exp(-result)) * tl.sum(other_total, 0)
    tl.store(
        out + row[None, :] * outs + index[:, None],
        result.to(out.dtype.element_ty),
        mask=(row < rows)[None, :] & live[:, None],
    )


@triton.jit(do_not_specialize=["outs"])
def _unpack(
    words,
    scale,
    zero,
    out,
    columns,
    outs,
    ZEROED: tl.constexpr,
    GROUP: tl.constexpr,
    OUTS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
):
    index = (tl.program_id(0) * OUTS + tl.arange(0, OUTS)).to(tl.int64)[:, None]
    word = tl.program_id(1) * UNITS * WORDS + tl.arange(0, UNITS * WORDS)[None, :]
    num_words, groups = tl.cdiv(columns, UNIT) * WORDS, columns // GROUP
    live = (index < outs) & (word < num_words)
    tile = tl.load(words + index * num_words + word, mask=live, other=0)
    for number in tl.static_range(8):
        column = word // WORDS * UNIT + number * WORDS + word % WORDS
        here = live & (column < columns)
        group = index * groups + column // GROUP
        code = ((tile >> (4 * number)) & 15).to(tl.float32)
        point = tl.load(zero + group, mask=here, other=0).to(tl.float32) if ZEROED else 8.0
        value = (code - point) * tl.load(scale + group, mask=here, other=0.0).to(tl.float32)
        tl.store(out + index * columns + column, value.to(out.dtype.element_ty), mask=here)


def linear(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, group: int, bias: Tensor | None) -> Tensor:
    return _launch(x, (words, scale, zero), None, group, bias)


def gated(
    x: Tensor,
    gate: tuple[Tensor, Tensor, Tensor | None],
    up: tuple[Tensor, Tensor, Tensor | None],
    group: int,
) -> Tensor:
    """Gate and up as words, scales and zero points, with groups of one size; both or neither with zero points."""
    return _launch(x, gate, up, group, None)


def unpack(words: Tensor, scale: Tensor, zero: Tensor | None, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of words, rounded to `dtype`."""
    outs, num_words = words.shape
    out = torch.empty(outs, columns, dtype=dtype, device=words.device)
    _unpack[(triton.cdiv(outs, OUTS), triton.cdiv(num_words, UNITS * WORDS))](
        words,
        scale,
        scale if zero is None else zero,
        out,
        columns,
        outs,
        ZEROED=zero is not None,
        GROUP=group,
        OUTS=OUTS,
        UNITS=UNITS,
        UNIT=UNIT,
        WORDS=WORDS,
    )
    return out


def _launch(
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor | None],
    other: tuple[Tensor, Tensor, Tensor | None] | None,
    group: int,
    bias: Tensor | None,
) -> Tensor:
    rows, columns = x.shape
    words, scale, zero = weight
    other_words, other_scale, other_zero = weight if other is None else other
    outs = words.shape[0]
    assert x.is_contiguous()
    assert words.is_contiguous()
    tiles = TILES if other is None else GATED_TILES
    most, (tile_outs, slices, warps, stages) = next(entry for entry in tiles if rows <= entry[0])
    base, bits = ONES[x.dtype]
    out = x.new_empty(rows, outs)
    _few[(triton.cdiv(outs, tile_outs),)](
        x,
        words,
        scale,
        scale if zero is None else zero,
        other_words,
        other_scale,
        other_scale if other_zero is None else other_zero,
        x if bias is None else bias,
        out,
        rows,
        columns,
        outs,
        GATED=other is not None,
        ZEROED=zero is not None,
        BIASED=bias is not None,
        EVEN=columns % (slices * UNIT) == 0,
        GROUP=group,
        PAIRS=4 if group >= UNIT else group // WORDS,  # from one scale to the next, in each half of a unit
        OUTS=tile_outs,
        SLICES=slices,
        ROWS=max(most, 8),  # the smallest tile that the tensor cores multiply
        UNIT=UNIT,
        WORDS=WORDS,
        BASE=base,
        BITS=bits,
        num_warps=warps,
        num_stages=stages,
        **launch_options(x),
    )
    return out
