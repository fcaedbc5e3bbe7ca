"""Triton: matmuls of a few rows with a weight, bound by reading the weight.

One row is multiplied and summed in registers, K split over the threads of a program. Several tiles of the weight load
at once, the first ones before the row is ready. A thread holds as many numbers of the row as of an output, so the row
needs no shared memory, and no tile is carried from one iteration to the next, for which the compiler would split fp8
into single bytes.

Two or more rows use the tensor cores, K split over the warps of a program, each with its own sums, because a chain of
dependent multiplications would take longer than loading the next tile. fp8 weights are converted to the dtype of the
rows in registers, and their scales are applied to the sums.

LoRA adapters are added to the sums, from the product of the rows with A that the preceding kernel made.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.adapters import Narrow, widened
from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

# (outputs of a program, maximum tiles that load at once, warps) for one row: 16 and 32 bits; fp8 with more inputs than
# outputs, with more outputs, and with gate and up at once
ONE_ROW, FP8_LONG, FP8_WIDE, FP8_GATED = (2, 7, 4), (4, 4, 2), (2, 8, 1), (1, 8, 1)
LOAD_BYTES = 16  # of the row, for a thread and a tile
# (outputs of a program, inputs of a tile, slices of these, warps, pipeline stages) for two rows and more, and for fp32,
# of which shared memory holds half as many
FEW, FEW_EXACT = (16, 256, 2, 2, 7), (16, 256, 2, 2, 3)
MAX_ROWS = 8  # the smallest tile that the tensor cores multiply


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


@triton.jit(do_not_specialize=["units", "outs"], do_not_specialize_on_alignment=["slots"])
def _single(
    x,
    weight,
    other,
    scale,
    other_scale,
    bias,
    b,
    other_b,
    slots,
    narrow,
    out,
    units,
    outs,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
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
    if LINES > 0:
        is_used = tl.load(slots) >= 0
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
    if LINES > 0:  # noqa: SIM102 - a constant, which Triton does not combine with a value
        if is_used:
            row = tl.arange(0, 1)
            own = tl.load(slots + row)
            width: tl.constexpr = LINES * 2 if GATED else LINES
            result += tl.sum(widened(b, narrow, own, index, row, 1, live, LINES, width, SLOTS, RANK, SPLITS), 1)
            if GATED:
                added = widened(other_b, narrow + LINES, own, index, row, 1, live, LINES, width, SLOTS, RANK, SPLITS)
                up += tl.sum(added, 1)
    if GATED:
        result = result / (1 + tl.exp(-result)) * up
    tl.store(out + index, result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "outs"], do_not_specialize_on_alignment=["slots"])
def _few(
    x,
    weight,
    other,
    scale,
    other_scale,
    bias,
    b,
    other_b,
    slots,
    narrow,
    out,
    rows,
    columns,
    outs,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.arange(0, ROWS)
    if LINES > 0:
        own = tl.load(slots + row, mask=row < rows, other=-1)
    wait_for_inputs(EARLY)
    slice_columns: tl.constexpr = COLUMNS // SLICES
    column = tl.arange(0, SLICES)[:, None] * slice_columns + tl.arange(0, slice_columns)[None, :]
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
    if LINES > 0:  # noqa: SIM102 - a constant, which Triton does not combine with a value
        if tl.max(own) >= 0:
            width: tl.constexpr = LINES * 2 if GATED else LINES
            result += widened(b, narrow, own, index, row, rows, live, LINES, width, SLOTS, RANK, SPLITS)
            if GATED:
                up += widened(other_b, narrow + LINES, own, index, row, rows, live, LINES, width, SLOTS, RANK, SPLITS)
    if GATED:
        result = result / (1 + tl.exp(-result)) * up
    tl.store(
        out + row[None, :] * outs + index[:, None],
        result.to(out.dtype.element_ty),
        mask=(row < rows)[None, :] & live[:, None],
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    narrow: Narrow | None = None,
    b: Tensor | None = None,
) -> Tensor:
    return _launch(x, weight, None, scale, None, bias, narrow, b, b)


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    narrow: Narrow | None = None,
    gate_b: Tensor | None = None,
    up_b: Tensor | None = None,
) -> Tensor:
    return _launch(x, gate, up, gate_scale, up_scale, None, narrow, gate_b, up_b)


def _launch(
    x: Tensor,
    weight: Tensor,
    other: Tensor | None,
    scale: Tensor | None,
    other_scale: Tensor | None,
    bias: Tensor | None,
    narrow: Narrow | None,
    b: Tensor | None,
    other_b: Tensor | None,
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
        x if b is None else b,
        x if other_b is None else other_b,
        x if narrow is None else narrow.of_tokens,
        x if narrow is None else narrow.values,
        out,
    )
    no_adapters = {"LINES": 0, "SLOTS": 0, "RANK": 0, "SPLITS": 0}
    options: dict[str, Any] = {
        "GATED": other is not None,
        "SCALED": scale is not None,
        "BIASED": bias is not None,
        **(no_adapters if narrow is None else narrow.constants(1 if other is None else 2)),
        **launch_options(x),
    }
    if rows == 1:
        row = _one_row(x, weight, other is not None)
        _single[(triton.cdiv(outs, row["OUTS"]),)](*arguments, columns // row["UNIT"], outs, **row, **options)
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


def _one_row(x: Tensor, weight: Tensor, is_gated: bool) -> dict[str, int]:
    """Return the constants of a program of one row, and its warps."""
    outs, columns = weight.shape
    if weight.element_size() > 1:
        tile_outs, max_tiles, warps = ONE_ROW
    elif is_gated:
        tile_outs, max_tiles, warps = FP8_GATED
    else:
        tile_outs, max_tiles, warps = FP8_WIDE if outs > columns else FP8_LONG
    inputs = LOAD_BYTES // x.element_size()
    tile_columns = 32 * warps * inputs
    all_tiles = triton.cdiv(columns, tile_columns)
    tiles = triton.cdiv(all_tiles, triton.cdiv(all_tiles, max_tiles))
    return {
        "EVEN": columns % (tiles * tile_columns) == 0,
        "UNIT": inputs if columns % inputs == 0 else 1,
        "OUTS": tile_outs,
        "COLUMNS": tile_columns,
        "TILES": tiles,
        "num_warps": warps,
    }
