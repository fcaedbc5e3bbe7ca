"""Triton: convert a bf16 matrix to fp8 in one pass, as is and transposed, or by rows with their own scales.

Hopper multiplies fp8 only if both operands are contiguous along the summed dimension, so the backward pass needs the
transpose of everything the forward pass used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
ROW_TILE = 4096  # elements of a row read at once


@triton.jit
def _quantize(
    source,
    straight,
    transposed,
    row_scale,
    column_scale,
    rows,
    columns,
    largest,
    SCALE_STEP: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row_live, column_live = row < rows, column < columns
    mask = row_live[:, None] & column_live[None, :]
    value = tl.load(source + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if STRAIGHT:
        scale = tl.load(row_scale + row * SCALE_STEP, mask=row_live, other=1.0)[:, None]
        cut = tl.minimum(tl.maximum(value * scale, -largest), largest)
        tl.store(straight + row[:, None] * columns + column[None, :], cut.to(straight.dtype.element_ty), mask=mask)
    if TRANSPOSED:
        scale = tl.load(column_scale + column * SCALE_STEP, mask=column_live, other=1.0)[None, :]
        cut = tl.minimum(tl.maximum(value * scale, -largest), largest)
        tl.store(
            transposed + column[:, None] * rows + row[None, :],
            tl.trans(cut.to(transposed.dtype.element_ty)),
            mask=column_live[:, None] & row_live[None, :],
        )


def quantize(
    source: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    dtype: torch.dtype,
    straight: bool = True,
    transposed: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (source · row_scale, its transpose · column_scale) in fp8; scales hold one number, or one per row."""
    rows, columns = source.shape
    plain = source.new_empty(rows, columns, dtype=dtype) if straight else None
    turned = source.new_empty(columns, rows, dtype=dtype) if transposed else None
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _quantize[grid](
        source,
        source if plain is None else plain,
        source if turned is None else turned,
        row_scale,
        column_scale,
        rows,
        columns,
        torch.finfo(dtype).max,
        SCALE_STEP=int(row_scale.numel() > 1),
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        num_warps=8,
    )
    return plain, turned


@triton.jit
def _quantize_rows(source, values, inverse, columns, largest, least, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source += row * columns
    values += row * columns
    extent = tl.full((TILE,), least, tl.float32)
    is_unsound = tl.zeros((TILE,), tl.int1)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        value = tl.load(source + column, mask=column < columns, other=0.0).to(tl.float32)
        extent = tl.maximum(extent, tl.abs(value))
        is_unsound = is_unsound | (value != value) | (tl.abs(value) == float("inf"))
    most = tl.max(extent, 0)
    # a maximum may ignore NaN
    unsound = tl.max(is_unsound.to(tl.int32), 0)
    tl.store(inverse + row, tl.where(unsound > 0, float("nan"), most / largest))
    scale = largest / most
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        live = column < columns
        value = tl.load(source + column, mask=live, other=0.0).to(tl.float32) * scale
        cut = tl.minimum(tl.maximum(value, -largest), largest)
        tl.store(values + column, cut.to(values.dtype.element_ty), mask=live)


def quantize_rows(source: Tensor, dtype: torch.dtype, least: float) -> tuple[Tensor, Tensor]:
    """Return (the matrix in fp8, the inverse scale of each row). A row's maximum, or `least`
    if that is larger, maps to the largest fp8 value."""
    source = source.contiguous()
    rows, columns = source.shape
    values = torch.empty_like(source, dtype=dtype)
    inverse = source.new_empty(rows, dtype=torch.float32)
    if rows:
        tile = min(ROW_TILE, triton.next_power_of_2(columns))
        largest = torch.finfo(dtype).max
        _quantize_rows[(rows,)](
            source, values, inverse, columns, largest, least, TILE=tile, num_warps=max(1, tile // 512)
        )
    return values, inverse
