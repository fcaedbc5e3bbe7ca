"""Triton: attention over latents, for the kernels of grouped heads (multi-head latent attention, arXiv:2405.04434).

The KV cache of latent attention has keys only, and all heads share them. A key is a latent, which is also the value,
followed by a tail of rotated numbers. So a tile of keys is read once: for the scores, with a second, narrow matmul over
the tail, and for the values. The rows of a matmul are heads × queries of a request. Accumulators as wide as a latent
limit how many fit a program, so more rows are several tiles, which kernels see as key/value heads in the same place
(stride 0): nearby programs that read the same keys, one from memory and the others from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Sizes of a kernel over latents."""

    max_rows: int  # of a matmul
    keys: int  # of a tile
    warps: int
    stages: int  # of the pipeline


# For 16-bit queries, for those over a cache in fp8, and for wider ones, whose tiles take twice the shared memory. On
# Hopper, 8 warps hold accumulators of 32 rows of 512 numbers in registers, and spill those of 64; a tile in fp8 also
# needs registers for its conversion.
NARROW, FLOAT8, WIDE = LatentTiles(32, 32, 8, 3), LatentTiles(32, 16, 8, 5), LatentTiles(16, 16, 8, 2)
MIN_TAIL = 16  # of a matmul


@triton.jit
def tail_of(asked, cache, row_live, HEAD_DIM: tl.constexpr, TAIL: tl.constexpr, TAIL_DIM: tl.constexpr):
    """The tails of queries at the pointers `asked` [rows], pointers to the tail of a key [1, TAIL], and which of these
    numbers it has."""
    column = tl.arange(0, TAIL)
    live = (column < TAIL_DIM)[None, :]
    tail = tl.load(asked[:, None] + HEAD_DIM + column[None, :], mask=row_live[:, None] & live, other=0.0)
    return tail, cache + HEAD_DIM + column[None, :], live


def latent_tiles(query: Tensor, cache: Tensor) -> LatentTiles:
    """Return the sizes for queries and a KV cache of these dtypes."""
    if query.element_size() > 2:
        return WIDE
    return FLOAT8 if cache.element_size() == 1 else NARROW


def heads_of_tile(heads: int, queries: int, max_rows: int) -> int:
    """Return how many heads share a tile of rows: a divisor of the heads."""
    return max((size for size in range(1, heads + 1) if heads % size == 0 and size * queries <= max_rows), default=1)


def tail_options(tail_dim: int) -> dict[str, Any]:
    """Return the options of a kernel for keys with a tail; 0: without."""
    return {"TAIL_DIM": tail_dim, "TAIL": max(MIN_TAIL, triton.next_power_of_2(tail_dim)) if tail_dim else 0}
