"""Triton: matmuls of a few rows with a weight, bound by reading the weight.

One row is multiplied and summed in registers, K split over the threads of a program; the first tile of the weight loads
before the row is ready. Two or more rows use the tensor cores, K split over the warps of a program, each with its own
sums, because a chain of dependent multiplications would take longer than loading the next tile. fp8 weights are
converted to the dtype of the rows in registers, and their scales are applied to the sums.

One row with fp8 weights has its own kernel, because half the bytes leave half the time for instructions. A thread holds
as many numbers of the row as of a weight, so the row needs no shared memory, and no tile is carried from one iteration
to the next, for which the compiler would split it into single bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

# (outputs of a program, inputs of a tile, warps) for one row: long weights and short ones
LONG, SHORT = (2, 2048, 4), (4, 512, 4)
# (outputs of a program, maximum tiles that load at once, warps) for one row and fp8: one weight, and gate and up
NARROW, NARROW_GATED = (4, 7, 4), (2, 7, 4)
THREAD_INPUTS = 8  # of a thread in a tile of fp8: as many of the row are the 16 bytes of one load
# (outputs of a program, inputs of a tile, slices of these, warps, pipeline stages) for two rows and more, and for fp32,
# of which shared memory holds half as many
FEW, FEW_EXACT = (16, 256, 2, 2, 7), (16, 256, 2, 2, 3)
MAX_ROWS = 8  # the smallest tile that the tensor cores multiply


@triton.jit(do_not_specialize=["outs"])
def _single(
    x,
    weight,
    other,
    scale,
    other_scale,
    bias,
    out,
    columns,
    outs,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    column = tl.arange(0, COLUMNS)
    place = (index % outs).to(tl.int64)[:, None] * columns + column[None, :]
    begun = (EVEN | (column < columns))[None, :]
    tile = tl.load(weight + place, mask=begun, other=0.0, eviction_policy="evict_first")
    if GATED:
        other_tile = tl.load(other + place, mask=begun, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(EARLY)
    total = tl.zeros([OUTS, COLUMNS], tl.float32)
    other_total = tl.zeros([OUTS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        here = EVEN | (start + column < columns)
        value = tl.load(x + start + column, mask=here, other=0.0).to(tl.float32)[None, :]
        more = (start + COLUMNS + column < columns)[None, :]
        following = tl.load(weight + place + start + COLUMNS, mask=more, other=0.0, eviction_policy="evict_first")
        total += tile.to(tl.float32) * value
        tile = following
        if GATED:
            following = tl.load(other + place + start + COLUMNS, mask=more, other=0.0, eviction_policy="evict_first")
            other_total += other_tile.to(tl.float32) * value
            other_tile = following
    if not GATED:
        other_total = total
    _store(index, outs, total, other_total, scale, other_scale, bias, out, GATED, SCALED, BIASED)


@triton.jit
def _store(
    index,
    outs,
    total,
    other_total,
    scale,
    other_scale,
    bias,
    out,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Sum the products of one row, and apply scales, bias and gate."""
    live = index < outs
    result = tl.sum(total, 1)
    if SCALED:
        result *= tl.load(scale + index, mask=live, other=0.0)
    if BIASED:
        result += tl.load(bias + index, mask=live, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(other_total, 1)
        if SCALED:
            up *= tl.load(other_scale + index, mask=live, other=0.0)
        result = result / (1 + tl.exp(-result)) * up
    tl.store(out + index, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _load_tiles(weight, place, column, start, columns, EVEN: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Return the TILES tiles from column `start`."""
    tiles = tl.tuple(())
    for number in tl.static_range(TILES):
        first = start + number * COLUMNS
        live = (EVEN | (first + column < columns))[None, :]
        tiles += (tl.load(weight + place + first, mask=live, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_row(x, column, start, columns, EVEN: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    values = tl.tuple(())
    for number in tl.static_range(TILES):
        first = start + number * COLUMNS
        values += (tl.load(x + first + column, mask=EVEN | (first + column < columns), other=0.0),)
    return values


@triton.jit
def _add_products(total, tiles, values, TILES: tl.constexpr):
    for number in tl.static_range(TILES):
        total += tiles[number].to(tl.float32) * values[number].to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["units", "outs"])
def _single_fp8(
    x,
    weight,
    other,
    scale,
    other_scale,
    bias,
    out,
    units,
    outs,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The compiler learns of no larger divisor of the columns than UNIT, so a thread loads UNIT of them at once.
    columns = units * UNIT
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    column = tl.arange(0, COLUMNS)
    place = tl.minimum(index, outs - 1).to(tl.int64)[:, None] * columns + column[None, :]
    tiles = _load_tiles(weight, place, column, 0, columns, EVEN, COLUMNS, TILES)
    if GATED:
        other_tiles = _load_tiles(other, place, column, 0, columns, EVEN, COLUMNS, TILES)
    wait_for_inputs(EARLY)
    values = _load_row(x, column, 0, columns, EVEN, COLUMNS, TILES)
    total = _add_products(tl.zeros([OUTS, COLUMNS], tl.float32), tiles, values, TILES)
    other_total = tl.zeros([OUTS, COLUMNS], tl.float32)
    if GATED:
        other_total = _add_products(other_total, other_tiles, values, TILES)
    for start in range(TILES * COLUMNS, columns, TILES * COLUMNS):
        tiles = _load_tiles(weight, place, column, start, columns, EVEN, COLUMNS, TILES)
        if GATED:
            other_tiles = _load_tiles(other, place, column, start, columns, EVEN, COLUMNS, TILES)
        values = _load_row(x, column, start, columns, EVEN, COLUMNS, TILES)
        total = _add_products(total, tiles, values, TILES)
        if GATED:
            other_total = _add_products(other_total, other_tiles, values, TILES)
    _store(index, outs, total, other_total, scale, other_scale, bias, out, GATED, SCALED, BIASED)


@triton.jit(do_not_specialize=["rows", "outs"])
def _few(
    x,
    weight,
    other,
    scale,
    other_scale,
    bias,
    out,
    rows,
    columns,
    outs,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    wait_for_inputs(EARLY)
    slice_columns: tl.constexpr = COLUMNS // SLICES
    column = tl.arange(0, SLICES)[:, None] * slice_columns + tl.arange(0, slice_columns)[None, :]
    row = tl.arange(0, ROWS)
    place = (index % outs).to(tl.int64)[None, :, None] * columns + column[:, None, :]
    total = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    other_total = tl.zeros([SLICES, OUTS, ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        live = EVEN | (start + column < columns)
        tile = tl.load(weight + place + start, mask=live[:, None, :], other=0.0, eviction_policy="evict_first")
        value = tl.load(
            x + row[None, None, :] * columns + start + column[:, :, None],
            mask=(row < rows)[None, None, :] & live[:, :, None],
            other=0.0,
        )
        total = tl.dot(tile.to(value.dtype), value, total, input_precision="ieee")
        if GATED:
            other_tile = tl.load(other + place + start, mask=live[:, None, :], other=0.0, eviction_policy="evict_first")
            other_total = tl.dot(other_tile.to(value.dtype), value, other_total, input_precision="ieee")
    live = index < outs
    result = tl.sum(total, 0)
    if SCALED:
        result *= tl.load(scale + index, mask=live, other=0.0)[:, None]
    if BIASED:
        result += tl.load(bias + index, mask=live, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = tl.sum(other_total, 0)
        if SCALED:
            up *= tl.load(other_scale + index, mask=live, other=0.0)[:, None]
        result = result / (1 + tl.exp(-result)) * up
    tl.store(
        out + row[None, :] * outs + index[:, None],
        result.to(out.dtype.element_ty),
        mask=(row < rows)[None, :] & live[:, None],
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    return _launch(x, weight, None, scale, None, bias)


def gated(x: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None, up_scale: Tensor | None) -> Tensor:
    return _launch(x, gate, up, gate_scale, up_scale, None)


def _launch(
    x: Tensor,
    weight: Tensor,
    other: Tensor | None,
    scale: Tensor | None,
    other_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    rows, columns = x.shape
    outs = weight.shape[0]
    assert rows <= MAX_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert other is None or other.is_contiguous()
    out = x.new_empty(rows, outs)
    arguments = (
        x,
        weight,
        weight if other is None else other,
        x if scale is None else scale,
        x if other_scale is None else other_scale,
        x if bias is None else bias,
        out,
    )
    options = {
        "GATED": other is not None,
        "SCALED": scale is not None,
        "BIASED": bias is not None,
        **launch_options(x),
    }
    if rows == 1 and scale is not None:
        tile_outs, max_tiles, warps = NARROW if other is None else NARROW_GATED
        tile_columns = 32 * warps * THREAD_INPUTS
        all_tiles = triton.cdiv(columns, tile_columns)
        tiles = triton.cdiv(all_tiles, triton.cdiv(all_tiles, max_tiles))
        unit = THREAD_INPUTS if columns % THREAD_INPUTS == 0 else 1
        _single_fp8[(triton.cdiv(outs, tile_outs),)](
            *arguments,
            columns // unit,
            outs,
            EVEN=columns % (tiles * tile_columns) == 0,
            UNIT=unit,
            OUTS=tile_outs,
            COLUMNS=tile_columns,
            TILES=tiles,
            num_warps=warps,
            **options,
        )
    elif rows == 1:
        tile_outs, tile_columns, warps = LONG if columns >= LONG[1] else SHORT
        _single[(triton.cdiv(outs, tile_outs),)](
            *arguments,
            columns,
            outs,
            EVEN=columns % tile_columns == 0,
            OUTS=tile_outs,
            COLUMNS=tile_columns,
            num_warps=warps,
            **options,
        )
    else:
        tile_outs, tile_columns, slices, warps, stages = FEW if x.element_size() == 2 else FEW_EXACT
        _few[(triton.cdiv(outs, tile_outs),)](
            *arguments,
            rows,
            columns,
            outs,
            EVEN=columns % tile_columns == 0,
            OUTS=tile_outs,
            COLUMNS=tile_columns,
            SLICES=slices,
            ROWS=MAX_ROWS,
            num_warps=warps,
            num_stages=stages,
            **options,
        )
    return out
