"""Triton: LoRA adapters, each token with its own, for any number of tokens. Only adapters in use are read.

The first kernel multiplies the tokens with A: a program has a block of tokens, a part of the inputs, and some of the
slots; it skips slots that no token of the block uses. The second adds the product with B to the output; `skinny` does
so itself for a few tokens. A block of tokens without adapters costs a launch and one read of its slots.

A row of a tile is stored or added only where the token uses the tile's slot, so an overflow in one adapter stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, start_next, wait_for_inputs


@dataclass(frozen=True)
class Tiles:
    """The tokens of a program; the inputs and warps of a program with A; the outputs and warps of one with B."""

    tokens: int
    columns: int
    narrow_warps: int
    outs: int
    widen_warps: int


SMALL, LARGE = Tiles(16, 1024, 4, 64, 4), Tiles(64, 1024, 4, 128, 8)
MAX_LINES = 64  # rows of A in a tile
MAX_LANES = 8  # programs that share the slots of a block of tokens


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _narrow(
    x,
    a,
    slots,
    narrow,
    tokens,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_LINES: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)  # the next kernel reads nothing but weights and slots before it waits
    tiles: tl.constexpr = (LINES + TILE_LINES - 1) // TILE_LINES
    split = tl.program_id(2) // tiles
    line = tl.program_id(2) % tiles * TILE_LINES + tl.arange(0, TILE_LINES)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(slots + token, mask=token < tokens, other=-1)
    is_used = tl.max(own) >= 0
    if is_used | (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0):
        wait_for_inputs(EARLY)
    if is_used:
        column = tl.arange(0, STEP)
        begin = split * SPAN
        for slot in range(tl.program_id(1), SLOTS, tl.num_programs(1)):
            mine = own == slot
            if tl.max(mine.to(tl.int32)) > 0:
                row = (line // RANK * SLOTS + slot) * RANK + line % RANK
                x_rows = x + token.to(tl.int64)[:, None] * COLUMNS + column[None, :]
                a_rows = a + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
                total = tl.zeros([BLOCK, TILE_LINES], tl.float32)
                for start in range(begin, tl.minimum(begin + SPAN, COLUMNS), STEP):
                    here = (COLUMNS % STEP == 0) | (start + column < COLUMNS)
                    value = tl.load(x_rows + start, mask=mine[:, None] & here[None, :], other=0.0)
                    tile = tl.load(a_rows + start, mask=(line < LINES)[None, :] & here[:, None], other=0.0)
                    total = tl.dot(value, tile, total, input_precision="ieee")
                place = (split.to(tl.int64) * tokens + token[:, None]) * LINES + line[None, :]
                tl.store(narrow + place, total, mask=mine[:, None] & (line < LINES)[None, :])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _widen(
    out,
    other_out,
    b,
    other_b,
    slots,
    narrow,
    tokens,
    WIDTH: tl.constexpr,
    PAIR: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_LINES: tl.constexpr,
    OUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(slots + token, mask=token < tokens, other=-1)
    is_used = tl.max(own) >= 0
    if is_used | (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0):
        wait_for_inputs(EARLY)
    if is_used:
        if PAIR:  # noqa: SIM102 - a constant, which Triton does not combine with a value
            if tl.program_id(2) == 1:
                out = other_out
                b = other_b
                narrow += LINES
        index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        total = tl.zeros([BLOCK, OUTS], tl.float32)
        for first in tl.static_range(0, LINES, TILE_LINES):
            line = first + tl.arange(0, TILE_LINES)
            there = line < LINES
            value = tl.zeros([BLOCK, TILE_LINES], tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * tokens + token.to(tl.int64))[:, None] * (LINES * (1 + PAIR)) + line[None, :]
                value += tl.load(narrow + place, mask=(own >= 0)[:, None] & there[None, :], other=0.0)
            value = value.to(b.dtype.element_ty)
            for slot in range(SLOTS):
                mine = own == slot
                if tl.max(mine.to(tl.int32)) > 0:
                    column = (line // RANK * SLOTS + slot) * RANK + line % RANK
                    own_b = index.to(tl.int64)[None, :] * (LINES * SLOTS) + column[:, None]
                    tile = tl.load(b + own_b, mask=(index < WIDTH)[None, :] & there[:, None], other=0.0)
                    total += tl.where(mine[:, None], tl.dot(value, tile, input_precision="ieee"), 0.0)
        target = out + token.to(tl.int64)[:, None] * WIDTH + index[None, :]
        live = (own >= 0)[:, None] & (index < WIDTH)[None, :]
        tl.store(target, (tl.load(target, mask=live).to(tl.float32) + total).to(out.dtype.element_ty), mask=live)


@triton.jit
def widened(
    b,
    narrow,
    own,
    index,
    row,
    rows,
    live,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """B · A · x of few rows, fp32 [outs, rows]: `own` is the slot of each row, WIDTH the lines of a row of `narrow`."""
    chunk: tl.constexpr = 16
    group: tl.constexpr = 64 if LINES > 64 else LINES  # the loads of a group are in flight together
    outs: tl.constexpr = index.shape[0]
    sums = tl.zeros([outs, row.shape[0], chunk], tl.float32)
    used = own >= 0
    for first in range(0, LINES, group):
        for begin in tl.static_range(0, group, chunk):
            line = first + begin + tl.arange(0, chunk)
            here = used[:, None] & (line < LINES)[None, :]
            value = tl.zeros([row.shape[0], chunk], tl.float32)
            for split in tl.static_range(SPLITS):
                value += tl.load(narrow + (split * rows + row)[:, None] * WIDTH + line[None, :], mask=here, other=0.0)
            column = (line // RANK * SLOTS * RANK + line % RANK)[None, :] + own[:, None] * RANK
            place = index.to(tl.int64)[:, None, None] * (LINES * SLOTS) + column[None, :, :]
            tile = tl.load(b + place, mask=live[:, None, None] & here[None, :, :], other=0.0)
            sums += tile.to(tl.float32) * value[None, :, :]
    return tl.sum(sums, 2)


@dataclass(frozen=True)
class Narrow:
    """The product of tokens with A, [splits, tokens, lines] in fp32, of which the splits are to be summed. Only the
    next kernel may use it."""

    values: Tensor
    of_tokens: Tensor
    tiles: Tiles
    slots: int
    rank: int

    def constants(self, outs: int) -> dict[str, Any]:
        """Return the constants of a kernel that multiplies this with the B of some outputs at once."""
        splits, _, lines = self.values.shape
        return {"LINES": lines // outs, "SLOTS": self.slots, "RANK": self.rank, "SPLITS": splits}


def multiply_a(x: Tensor, a: Tensor, of_tokens: Tensor, slots: int, rank: int) -> Narrow:
    """The kernel launched next must be one that adds the product with B."""
    x = x.contiguous()
    tokens, columns = x.shape
    lines = len(a) // slots
    tiles = SMALL if tokens <= SMALL.tokens or x.element_size() > 2 else LARGE  # sums of fp32 need many registers
    tile_lines = _tile_lines(lines)
    splits = triton.cdiv(columns, tiles.columns)
    values = torch.empty(splits, tokens, lines, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(tokens, tiles.tokens), min(slots, MAX_LANES), splits * triton.cdiv(lines, tile_lines))
    _narrow[grid](
        x,
        a,
        of_tokens,
        values,
        tokens,
        COLUMNS=columns,
        LINES=lines,
        SLOTS=slots,
        RANK=rank,
        BLOCK=tiles.tokens,
        TILE_LINES=tile_lines,
        SPAN=tiles.columns,
        STEP=256 // x.element_size(),
        num_warps=tiles.narrow_warps,
        num_stages=3,
        **launch_options(x),
    )
    return Narrow(values, of_tokens, tiles, slots, rank)


def add_adapters(
    outs: Sequence[Tensor], x: Tensor, a: Tensor, b: Sequence[Tensor], of_tokens: Tensor, slots: int, rank: int
) -> None:
    """As craton.ml.kernels.serving.adapters has it; one or two outputs."""
    assert all(out.is_contiguous() for out in outs)
    narrow = multiply_a(x, a, of_tokens, slots, rank)
    constants, tiles = narrow.constants(len(outs)), narrow.tiles
    tokens, width = outs[0].shape
    grid = (triton.cdiv(width, tiles.outs), triton.cdiv(tokens, tiles.tokens), len(outs))
    _widen[grid](
        outs[0],
        outs[-1],
        b[0],
        b[-1],
        of_tokens,
        narrow.values,
        tokens,
        WIDTH=width,
        PAIR=len(outs) - 1,
        BLOCK=tiles.tokens,
        TILE_LINES=_tile_lines(constants["LINES"]),
        OUTS=tiles.outs,
        num_warps=tiles.widen_warps,
        **constants,
        **launch_options(x),
    )


def _tile_lines(lines: int) -> int:
    return min(MAX_LINES, max(16, triton.next_power_of_2(lines)))
