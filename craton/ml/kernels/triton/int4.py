"""Triton: matmuls of up to 256 rows with a 4-bit weight, and the weight of a layer in 16 bits for more rows.

Each word holds eight columns of one output (see `craton.ml.kernels.serving.int4`). One row is multiplied and summed in
registers (`int4_single`), up to 16 rows here, and more by warp groups (`int4_many`). Here and there one mask gives two
columns, as the low mantissa bits of two bf16 numbers from 128 to 143 (fp16: from 1024): integers without a conversion,
from which 128 + zero point is subtracted, both exactly. The tensor cores multiply these integers. Sums are fp32, and
the scale of a group is applied to its sum, so that no weight is rounded. Up to 16 rows, each warp sums its own slice of
the columns, and every weight is unpacked once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.int4_many import add_splits, many
from craton.ml.kernels.triton.int4_single import single
from craton.ml.kernels.triton.launch import launch_options, processors, wait_for_inputs

UNIT, WORDS = 128, 16  # columns that are packed together, and their words
UNITS_PER_WARP = 8  # in the tile of one row: each thread loads 16 bytes of each output
SINGLE, GATED_SINGLE = (4, 2), (2, 2)  # (outputs of a program, warps) for one row
# (rows, (outputs of a program, slices of 128 columns of a tile, warps, pipeline stages)), for up to so many rows
FEW = ((8, (32, 4, 4, 4)), (16, (32, 4, 4, 3)))
GATED_FEW = ((16, (16, 4, 4, 3)),)  # gate and up at once: half the outputs, because a program unpacks two weights
# (rows, (outputs of a program, rows of a program, warps, pipeline stages)), for up to so many rows
MANY = ((32, (64, 32, 4, 3)), (256, (64, 64, 4, 3)))
PROGRAMS, MIN_UNITS = 4, 4  # programs of a multiprocessor that the inputs are split for, and the least units of one
SUMS = 1024  # of a program that adds the sums of splits
OUTS, COLUMNS, UNPACK_WARPS = 4, 1024, 4  # of a program that unpacks a weight; each thread stores 16 bytes
INTEGERS = 0x4B000000  # bits of 2²³, an fp32 number whose last bit is 1
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
def _group_of(first, start, columns, GROUP: tl.constexpr):
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
                group = of_groups + _group_of(column, near, columns, GROUP)[:, None]
                high_group = of_groups + _group_of(column, far, columns, GROUP)[:, None]
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


@triton.jit(do_not_specialize=["outs", "integers"])
def _unpack(
    words,
    scale,
    zero,
    out,
    columns,
    outs,
    integers,
    ZEROED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    num_words, groups = tl.cdiv(columns, 128) * 16, columns // GROUP
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    eight = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // 8) * 8  # columns of one thread, in one group
    word, shift = column // 128 * 16 + column % 16, column // 16 % 8 * 4
    live, eight_live = EVEN | (column < columns), EVEN | (eight < columns)
    for number in tl.static_range(OUTS):
        known = ((tl.program_id(0) * OUTS + number) % outs).to(tl.int64)  # past the end, outputs again
        tile = tl.load(words + known * num_words + word, mask=live, other=0)
        group = known * groups + eight // GROUP
        by = tl.load(scale + group, mask=eight_live, other=0.0).to(tl.float32)
        point = tl.full([COLUMNS // 8], 8.0, tl.float32)
        if ZEROED:
            point = tl.load(zero + group, mask=eight_live, other=0).to(tl.float32)
        code = (((tile >> shift) & 15) | integers).to(tl.float32, bitcast=True)
        value = (tl.reshape(code, [COLUMNS // 8, 8]) - (8388608.0 + point)[:, None]) * by[:, None]
        value = tl.reshape(value, [COLUMNS]).to(out.dtype.element_ty)
        tl.store(out + known * columns + column, value, mask=live)


def linear(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, group: int, bias: Tensor | None) -> Tensor:
    weight = (words, scale, zero)
    return _launch_many(x, weight, group, bias) if len(x) > FEW[-1][0] else _launch(x, weight, None, group, bias)


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
    outs = len(words)
    out = torch.empty(outs, columns, dtype=dtype, device=words.device)
    _unpack[(triton.cdiv(outs, OUTS), triton.cdiv(columns, COLUMNS))](
        words,
        scale,
        scale if zero is None else zero,
        out,
        columns,
        outs,
        INTEGERS,
        ZEROED=zero is not None,
        EVEN=columns % COLUMNS == 0,
        GROUP=group,
        OUTS=OUTS,
        COLUMNS=COLUMNS,
        num_warps=UNPACK_WARPS,
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
    arguments = (
        x,
        words,
        scale,
        scale if zero is None else zero,
        other_words,
        other_scale,
        other_scale if other_zero is None else other_zero,
        x if bias is None else bias,
        out := x.new_empty(rows, outs),
    )
    options = {
        "GATED": other is not None,
        "ZEROED": zero is not None,
        "BIASED": bias is not None,
        "GROUP": group,
        **launch_options(x),
    }
    if rows == 1:
        tile_outs, warps = SINGLE if other is None else GATED_SINGLE
        single[(triton.cdiv(outs, tile_outs),)](
            *arguments,
            columns,
            outs,
            EVEN=columns % (UNITS_PER_WARP * warps * UNIT) == 0,
            GROUPS=max(1, UNIT // group),
            OUTS=tile_outs,
            UNITS=UNITS_PER_WARP * warps,
            num_warps=warps,
            **options,
        )
        return out
    tiles = FEW if other is None else GATED_FEW
    most, (tile_outs, slices, warps, stages) = next(entry for entry in tiles if rows <= entry[0])
    base, bits = ONES[x.dtype]
    _few[(triton.cdiv(outs, tile_outs),)](
        *arguments,
        rows,
        columns,
        outs,
        EVEN=columns % (slices * UNIT) == 0,
        PAIRS=4 if group >= UNIT else group // WORDS,  # from one scale to the next, in each half of a unit
        OUTS=tile_outs,
        SLICES=slices,
        ROWS=most,
        UNIT=UNIT,
        WORDS=WORDS,
        BASE=base,
        BITS=bits,
        num_warps=warps,
        num_stages=stages,
        **options,
    )
    return out


def _launch_many(x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], group: int, bias: Tensor | None) -> Tensor:
    rows, columns = x.shape
    words, scale, zero = weight
    outs = len(words)
    assert x.is_contiguous()
    assert words.is_contiguous()
    tile_outs, tile_rows, warps, stages = next(tile for most, tile in MANY if rows <= most)
    tiles, units = triton.cdiv(outs, tile_outs) * triton.cdiv(rows, tile_rows), triton.cdiv(columns, UNIT)
    splits = max(1, min(units // MIN_UNITS, PROGRAMS * processors(x.device) // tiles))
    base, bits = ONES[x.dtype]
    out = x.new_empty(rows, outs)
    sums = out if splits == 1 else x.new_empty(splits, rows, outs, dtype=torch.float32)
    given_bias, options = x if bias is None else bias, {"BIASED": bias is not None, **launch_options(x)}
    many[(triton.cdiv(outs, tile_outs), triton.cdiv(rows, tile_rows), splits)](
        x,
        words,
        scale,
        scale if zero is None else zero,
        given_bias,
        sums,
        rows,
        columns,
        outs,
        splits,
        ZEROED=zero is not None,
        SPLIT=splits > 1,
        EVEN=columns % UNIT == 0,
        GROUP=group,
        PIECES=8 if group >= UNIT else group // WORDS,  # from one scale to the next
        OUTS=tile_outs,
        ROWS=tile_rows,
        BASE=base,
        BITS=bits,
        num_warps=warps,
        num_stages=stages,
        **options,
    )
    if splits > 1:
        add_splits[(triton.cdiv(rows * outs, SUMS),)](
            sums, given_bias, out, rows, outs, splits, SUMS=SUMS, num_warps=4, **options
        )
    return out
