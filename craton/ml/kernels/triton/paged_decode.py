"""Triton: decode attention over the paged KV cache: the last few tokens of each request, at memory bandwidth.

The work is split on the device into pieces: tiles of keys of one request and key/value head. Their size gives the GPU a
whole number of pieces per slot. So ragged lengths, few requests and many requests all fill the GPU, and the launch
decides nothing. A head in one piece is done when its program ends. Otherwise each piece stores a partial result with
the maximum and the sum of its softmax, and a second kernel merges them. The heads that share a key/value head, times
the queries of a request, are the rows of one matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, processors, request_bound, wait_for_inputs

# (keys of a tile, warps, stages of the pipeline, programs a multiprocessor runs) for keys of up to 256 bytes, and wider
NARROW, WIDE = (64, 4, 3, 3), (32, 4, 3, 3)
WHOLE_TILES = 2  # up to this a head is always one piece
LARGE_PIECE = 16  # tiles per piece above which more pieces per slot are preferred to larger ones
MAX_ROUNDS = 4  # maximum pieces per slot, for heads that are split
# (partial results per iteration, warps) of the merge, if all its programs run at once and if they do not
FAST_MERGE, LIGHT_MERGE = (64, 4), (16, 2)
LOG2_E = 1.4426950408889634


@triton.jit
def _plan(
    lengths,
    requests,
    places,
    rounds,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each request: its length, the first visible tile, the number of tiles from there, the pieces per head, and
    where its pieces end in the numbering of all.

    The GPU has `places` slots for pieces; with at most `rounds` pieces per slot, they are as large as that allows.
    """
    request = tl.arange(0, REQUESTS)
    length = tl.load(lengths + request, mask=request < requests, other=0)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES - WINDOW + 1, 0) // BLOCK
    tiles = tl.cdiv(length, BLOCK) - first
    if WHOLE:
        pieces = (request < requests).to(tl.int32)
    else:
        total = tl.sum(tiles, 0) * KV_HEADS
        rounds = tl.minimum(tl.maximum(total // (places * LARGE), 1), rounds)
        size = tl.cdiv(total, places * rounds)
        pieces = tl.maximum((tiles + size // 2) // size, (request < requests).to(tl.int32))
    return length, first, tiles, pieces, tl.cumsum(pieces, 0) * KV_HEADS


@triton.jit
def _pick(values, index, REQUESTS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, REQUESTS) == index, values, 0), 0)


@triton.jit(do_not_specialize=["requests", "rounds"], do_not_specialize_on_alignment=["rows", "lengths"])
def _attend(
    query,
    cache,
    table,
    rows,
    lengths,
    out,
    partial,
    partial_sums,
    scale,
    requests,
    places,
    rounds,
    query_token_stride,
    query_head_stride,
    block_stride,
    part_stride,
    head_stride,
    place_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Lengths, rows and table are older than the previous kernel, which stored this step's keys: no need to wait.
    program = tl.program_id(0)
    length, first, tiles, pieces, ends = _plan(
        lengths, requests, places, rounds, KV_HEADS, QUERIES, WINDOW, WHOLE, LARGE, REQUESTS, BLOCK
    )
    number = tl.arange(0, REQUESTS)
    table_row = tl.load(rows + number, mask=number < requests, other=0)
    request = tl.sum((ends <= program).to(tl.int32), 0)
    within = program - tl.max(tl.where(ends <= program, ends, 0), 0)
    live = request < requests
    length = _pick(length, request, REQUESTS)
    first = _pick(first, request, REQUESTS)
    tiles = _pick(tiles, request, REQUESTS)
    pieces = tl.maximum(_pick(pieces, request, REQUESTS), 1)
    blocks = table + _pick(table_row, request, REQUESTS).to(tl.int64) * table_stride
    head = within // pieces
    piece = within % pieces
    begin = first + piece * tiles // pieces
    end = first + (piece + 1) * tiles // pieces
    column = tl.arange(0, BLOCK)
    place = begin * BLOCK + column
    block = tl.load(blocks + place // PAGE, mask=place < length, other=0)
    wait_for_inputs(EARLY)
    if not live:
        return

    row = tl.arange(0, ROWS)
    row_live = row < GROUP * QUERIES
    dim = tl.arange(0, DIM)
    dim_live = (dim < HEAD_DIM)[None, :]
    token = request.to(tl.int64) * QUERIES + row // GROUP
    query_head = head * GROUP + row % GROUP
    own_place = (length - QUERIES + row // GROUP)[:, None]
    asked = query + token * query_token_stride + query_head * query_head_stride
    q = tl.load(asked[:, None] + dim[None, :], mask=row_live[:, None] & dim_live, other=0.0)
    keys = cache + head * head_stride + dim[None, :]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS, BLOCK], tl.float32)  # summed over columns at the end, because that synchronizes the warps
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(begin, end):
        key_live = (place < length)[:, None] & dim_live
        source = (block.to(tl.int64) * block_stride + (place % PAGE) * place_stride)[:, None]
        # prefetch the block numbers of the next tile, so that its keys need not wait for them
        block = tl.load(blocks + (place + BLOCK) // PAGE, mask=place + BLOCK < length, other=0)
        k = tl.load(keys + source, mask=key_live, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        sees = place[None, :] <= own_place
        if WINDOW > 0:
            sees &= place[None, :] > own_place - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        fading = tl.exp2(largest - shift)[:, None]
        summed = summed * fading + weights
        v = tl.load(keys + part_stride + source, mask=key_live, other=0.0)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading, input_precision="ieee")
        largest = new_largest
        place += BLOCK
    total = tl.sum(summed, 1)
    if pieces == 1:
        target = out + (token * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + dim[None, :]
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=row_live[:, None] & dim_live)
    else:
        slot = program * (GROUP * QUERIES) + row
        tl.store(partial + slot[:, None] * DIM + dim[None, :], mixed, mask=row_live[:, None])
        tl.store(partial_sums + 2 * slot, largest, mask=row_live)
        tl.store(partial_sums + 2 * slot + 1, total, mask=row_live)


@triton.jit(do_not_specialize=["requests", "rounds"], do_not_specialize_on_alignment=["lengths"])
def _merge(
    lengths,
    out,
    partial,
    partial_sums,
    requests,
    places,
    rounds,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    request = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    row = tl.program_id(1)
    _, _, _, pieces, ends = _plan(
        lengths, requests, places, rounds, KV_HEADS, QUERIES, WINDOW, WHOLE, LARGE, REQUESTS, BLOCK
    )
    pieces = _pick(pieces, request, REQUESTS)
    begin = _pick(ends, request, REQUESTS) - (KV_HEADS - head) * pieces
    # A program without work may end early, but not all of them: the next kernel waits only for the end of this one.
    if (pieces > 1) | (tl.program_id(0) == 0):
        wait_for_inputs(EARLY)
    if pieces > 1:
        dim = tl.arange(0, DIM)
        largest = tl.full([1], float("-inf"), tl.float32)
        summed = tl.zeros([1], tl.float32)
        mixed = tl.zeros([DIM], tl.float32)
        for start in range(0, pieces, STEP):
            piece = start + tl.arange(0, STEP)
            live = piece < pieces
            slot = (begin + piece) * (GROUP * QUERIES) + row
            theirs = tl.load(partial_sums + 2 * slot, mask=live, other=float("-inf"))
            sums = tl.load(partial_sums + 2 * slot + 1, mask=live, other=0.0)
            values = tl.load(partial + slot[:, None] * DIM + dim[None, :], mask=live[:, None], other=0.0)
            new_largest = tl.maximum(largest, tl.max(theirs, 0))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            fading = tl.exp2(largest - shift)
            weights = tl.exp2(theirs - shift)
            summed = summed * fading + tl.sum(sums * weights, 0)
            mixed = mixed * fading + tl.sum(values * weights[:, None], 0)
            largest = new_largest
        token = request.to(tl.int64) * QUERIES + row // GROUP
        target = out + (token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP) * HEAD_DIM + dim
        result = mixed / tl.where(summed > 0, summed, 1.0)
        tl.store(target, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    queries: int,
    scale: float | None,
    window: int,
    longest: int,
) -> Tensor:
    requests = rows.shape[0]
    _, heads, head_dim = query.shape
    _, _, kv_heads, page, _ = cache.shape
    group = heads // kv_heads
    assert query.stride(2) == cache.stride(4) == table.stride(1) == 1
    assert query.shape[0] == requests * queries
    dim = triton.next_power_of_2(head_dim)
    block, warps, stages, per_processor = NARROW if head_dim * query.element_size() <= 256 else WIDE
    places = processors(query.device) * per_processor
    tiles = triton.cdiv(longest, block)
    whole = tiles <= WHOLE_TILES
    all_heads = requests * kv_heads
    rounds = min(MAX_ROUNDS, max(1, all_heads * tiles // (places * LARGE_PIECE)))
    programs = all_heads if whole else min(all_heads * tiles, all_heads + places * rounds)
    slots = 0 if whole else programs
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial = torch.empty(slots, group * queries, dim, dtype=torch.float32, device=query.device)
    partial_sums = torch.empty(slots, group * queries, 2, dtype=torch.float32, device=query.device)
    options = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOW": window,
        "WHOLE": whole,
        "LARGE": LARGE_PIECE,
        "REQUESTS": request_bound(requests),
        "BLOCK": block,
        **launch_options(query),
    }
    _attend[(programs,)](
        query,
        cache,
        table,
        rows,
        lengths,
        out,
        partial,
        partial_sums,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        requests,
        places,
        rounds,
        *query.stride()[:2],
        *cache.stride()[:4],
        table.stride(0),
        PAGE=page,
        ROWS=max(16, triton.next_power_of_2(group * queries)),
        num_warps=warps,
        num_stages=stages,
        **options,
    )
    if not whole:
        step, merge_warps = FAST_MERGE if all_heads * group * queries <= places else LIGHT_MERGE
        _merge[(all_heads, group * queries)](
            lengths,
            out,
            partial,
            partial_sums,
            requests,
            places,
            rounds,
            STEP=step,
            num_warps=merge_warps,
            **options,
        )
    return out
