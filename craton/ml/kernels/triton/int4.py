"""Triton: matmuls of up to 64 rows with a 4-bit weight, and the weight of a layer in 16 bits for more rows.

Each word holds eight columns of one output (see `craton.ml.kernels.serving.int4`). One row is multiplied and summed in
registers (`int4_single`), and so is a row with gate and up at once; more rows use the tensor cores (`int4_many`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.int4_many import add_splits, many
from craton.ml.kernels.triton.int4_single import single
from craton.ml.kernels.triton.launch import launch_options, processors

UNIT = 128  # columns that are packed together
UNITS_PER_WARP = 8  # in the tile of one row: each thread loads 16 bytes of each output
# (outputs of a program, warps) for one row: of weights with more outputs than inputs, and of others and gate and up
WIDE, LONG = (8, 2), (2, 1)
# (rows, (outputs of a program, rows of a program, warps, pipeline stages)), for up to so many rows
MANY = ((16, (64, 16, 4, 4)), (64, (64, 32, 4, 4)))
PROGRAMS, MIN_UNITS = 4, 4  # programs of a multiprocessor that the inputs are split for, and the least units of one
SUMS = 1024  # of a program that adds the sums of splits
OUTS, COLUMNS, UNPACK_WARPS = 4, 1024, 4  # of a program that unpacks a weight; each thread stores 16 bytes
INTEGERS = 0x4B000000  # bits of 2²³, an fp32 number whose last bit is 1
ONES = {torch.bfloat16: (128, 0x4300), torch.float16: (1024, 0x6400)}  # the number whose last bit is 1, and its bits


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
    return _launch_many(x, weight, group, bias) if len(x) > 1 else _launch_single(x, weight, None, group, bias)


def gated(
    x: Tensor,
    gate: tuple[Tensor, Tensor, Tensor | None],
    up: tuple[Tensor, Tensor, Tensor | None],
    group: int,
) -> Tensor:
    """One row; gate and up have groups of one size, and both or neither have zero points."""
    return _launch_single(x, gate, up, group, None)


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


def _launch_single(
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
    assert rows == 1
    assert x.is_contiguous()
    assert words.is_contiguous()
    tile_outs, warps = WIDE if other is None and outs > columns else LONG
    out = x.new_empty(rows, outs)
    single[(triton.cdiv(outs, tile_outs),)](
        x,
        words,
        scale,
        scale if zero is None else zero,
        other_words,
        other_scale,
        other_scale if other_zero is None else other_zero,
        x if bias is None else bias,
        out,
        columns,
        outs,
        GATED=other is not None,
        ZEROED=zero is not None,
        BIASED=bias is not None,
        EVEN=columns % (UNITS_PER_WARP * warps * UNIT) == 0,
        GROUP=group,
        GROUPS=max(1, UNIT // group),
        OUTS=tile_outs,
        UNITS=UNITS_PER_WARP * warps,
        num_warps=warps,
        **launch_options(x),
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
        PIECES=8 if group >= UNIT else group // 16,  # of 16 columns, from one scale to the next
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
