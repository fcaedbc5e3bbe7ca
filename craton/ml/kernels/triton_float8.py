"""Triton: a bf16 matrix to fp8 in one pass, as it lies and transposed.

Hopper multiplies fp8 only when both operands run along the summed dimension, so the backward pass needs the transpose
of everything the forward pass used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128


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
    """(source · row_scale, its transpose · column_scale) in fp8; scales hold one number, or one for each row."""
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
