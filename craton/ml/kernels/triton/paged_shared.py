"""Triton: the first half of cascade attention. All queries of a group's requests attend to the blocks they share.

A tile of queries (requests × heads of one key/value head) is one matmul with a tile of keys. The shared tokens are
split on the device so that all groups together give each multiprocessor one program. Programs that read the same keys
for different queries are neighbours: one reads them from memory, the others from the L2 cache. Each program stores a
partial result with the maximum and the sum of its softmax; `paged_decode` merges them with those of each request's own
tokens.

These programs compute more than they read, and those of `paged_decode` the reverse, so both are in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.shared_prefixes import SharedPrefixes
from craton.ml.kernels.triton.latents import LatentTiles, tail_of
from craton.ml.kernels.triton.launch import processors, wait_for_inputs

MAX_ROWS = 64  # queries of a tile
NARROW, WIDE = 32, 16  # keys of a tile, of up to 256 bytes each, and wider


@dataclass(frozen=True, slots=True)
class PrefixPartials:
    """Where the partial results of all programs go, and what their numbering depends on (`plan_prefixes`)."""

    partial: Tensor  # fp32 [programs, rows, dim]
    sums: Tensor  # fp32 [programs, rows, 2], maximum and sum
    places: int
    rows: int
    block: int

    @property
    def programs(self) -> int:
        return len(self.partial)


@triton.jit
def plan_prefixes(
    ends,
    tokens,
    places,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """For each group: its first member, the end of its members, its tokens, tiles of queries per head, splits of its
    tokens, and where its programs end in the numbering of all.

    There are about `places` programs; a split has a whole number of tiles of keys."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    length = tl.load(tokens + group)
    query_tiles = tl.cdiv((end - begin) * GROUP, ROWS)
    tiles = tl.cdiv(length, BLOCK)
    size = tl.maximum(tl.cdiv(tl.sum(query_tiles * tiles, 0) * KV_HEADS, places), 1)
    splits = tl.maximum((tiles + size // 2) // size, 1)
    return begin, end, length, query_tiles, splits, tl.cumsum(query_tiles * splits, 0) * KV_HEADS


@triton.jit
def pick(values, index, COUNT: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, COUNT) == index, values, 0), 0)


@triton.jit
def attend_prefix(
    program,
    query,
    cache,
    table,
    members,
    ends,
    rows,
    tokens,
    partial,
    partial_sums,
    scale,
    places,
    query_token_stride,
    query_head_stride,
    block_stride,
    part_stride,
    head_stride,
    place_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What one program does. After the last group's programs it has no queries and no tokens, and stores nothing."""
    # Groups and table are older than the previous kernel, which stored this step's keys: no need to wait.
    begin, end, length, query_tiles, splits, program_ends = plan_prefixes(
        ends, tokens, places, KV_HEADS, GROUP, ROWS, BLOCK, GROUPS
    )
    group = tl.sum((program_ends <= program).to(tl.int32), 0)
    within = program - tl.max(tl.where(program_ends <= program, program_ends, 0), 0)
    begin = pick(begin, group, GROUPS)
    end = pick(end, group, GROUPS)
    length = pick(length, group, GROUPS)
    query_tiles = tl.maximum(pick(query_tiles, group, GROUPS), 1)
    splits = tl.maximum(pick(splits, group, GROUPS), 1)
    query_tile = within % query_tiles
    split = within // query_tiles % splits
    head = within // query_tiles // splits
    row = tl.arange(0, ROWS)
    entry = query_tile * ROWS + row  # of the group: member × head
    row_live = begin + entry // GROUP < end
    request = tl.load(members + begin + entry // GROUP, mask=row_live, other=0)
    table_row = tl.load(rows + tl.minimum(group, GROUPS - 1))
    blocks = table + table_row.to(tl.int64) * table_stride
    tiles = tl.cdiv(length, BLOCK)
    first = split * tiles // splits
    last = (split + 1) * tiles // splits
    column = tl.arange(0, BLOCK)
    place = first * BLOCK + column
    block = tl.load(blocks + place // PAGE, mask=place < length, other=0)
    wait_for_inputs(EARLY)
    dim = tl.arange(0, DIM)
    dim_live = (dim < HEAD_DIM)[None, :]
    asked = query + request.to(tl.int64) * query_token_stride + (head * GROUP + entry % GROUP) * query_head_stride
    q = tl.load(asked[:, None] + dim[None, :], mask=row_live[:, None] & dim_live, other=0.0)
    keys = cache + head * head_stride + dim[None, :]
    if TAIL > 0:
        q_tail, tail_keys, tail_live = tail_of(asked, cache, row_live, HEAD_DIM, TAIL, TAIL_DIM)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(first, last):
        key_live = (place < length)[:, None] & dim_live
        source = (block.to(tl.int64) * block_stride + (place % PAGE) * place_stride)[:, None]
        # prefetch the block numbers of the next tile, so that its keys need not wait for them
        block = tl.load(blocks + (place + BLOCK) // PAGE, mask=place + BLOCK < length, other=0)
        k = tl.load(keys + source, mask=key_live, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if TAIL > 0:
            k_tail = tl.load(tail_keys + source, mask=(place < length)[:, None] & tail_live, other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail.to(q.dtype)), scores, input_precision="ieee")
        scores = scores * scale
        scores = tl.where((place < length)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))  # finite: a tile has a key or more
        weights = tl.exp2(scores - new_largest[:, None])
        fading = tl.exp2(largest - new_largest)
        summed = summed * fading + tl.sum(weights, 1)
        v = k
        if TAIL == 0:
            v = tl.load(keys + part_stride + source, mask=key_live, other=0.0)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading[:, None], input_precision="ieee")
        largest = new_largest
        place += BLOCK
    slot = program.to(tl.int64) * ROWS + row
    tl.store(partial + slot[:, None] * DIM + dim[None, :], mixed, mask=row_live[:, None])
    tl.store(partial_sums + 2 * slot, largest, mask=row_live)
    tl.store(partial_sums + 2 * slot + 1, summed, mask=row_live)


def prefix_partials(
    query: Tensor, kv_heads: int, shared: SharedPrefixes, dim: int, sizes: LatentTiles | None
) -> PrefixPartials:
    """Return room for the partial results of all groups, `dim` numbers each: query [requests, heads, head_dim]."""
    requests, heads, head_dim = query.shape
    group, groups = heads // kv_heads, len(shared.ends)
    assert groups & (groups - 1) == 0
    block, max_rows = NARROW if head_dim * query.element_size() <= 256 else WIDE, MAX_ROWS
    if sizes is not None:
        block, max_rows = sizes.keys, sizes.max_rows
    rows = min(max_rows, max(16, triton.next_power_of_2(requests * group)))
    places = processors(query.device)
    # Σ query tiles · splits ≤ places / heads + Σ query tiles; a group has two or more members
    query_tiles = triton.cdiv(requests * group, rows) + min(groups, requests // 2)
    programs = places + kv_heads * query_tiles
    partial = torch.empty(programs, rows, dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(programs, rows, 2, dtype=torch.float32, device=query.device)
    return PrefixPartials(partial, sums, places, rows, block)
