"""Triton: prefill attention over the paged KV cache: the last tokens of each request, many ragged requests at once.

A program handles a block of one request's tokens with all heads that share a key/value head, or as many heads over
latents as fit. The blocks of all requests are numbered consecutively with at most one spare number per request, so a
launch knows their count from the number of tokens alone. The last blocks, which see the most keys, start first, and the
heads of a block together: so the last ones to end have the least work.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.latents import heads_of_tile, latent_tiles, tail_of, tail_options
from craton.ml.kernels.triton.launch import launch_options, request_bound, wait_for_inputs

# (rows of a block, keys of a tile, warps, stages of the pipeline) for keys of up to 256 bytes, and wider
NARROW, WIDE = (128, 64, 8, 3), (64, 32, 4, 2)
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_tiles(
    q,
    mixed,
    largest,
    summed,
    keys,
    part_stride,
    blocks,
    block_stride,
    place_stride,
    own_place,
    length,
    scale,
    begin,
    end,
    tail,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Accumulate the keys from `begin` to `end` into the softmax. Unless MASKED, every row sees all of them."""
    dim = tl.arange(0, DIM)
    dim_live = (dim < HEAD_DIM)[None, :]
    keys += dim[None, :]
    place = begin + tl.arange(0, TILE)
    has_whole_pages: tl.constexpr = TILE % PAGE == 0  # so the place in a page is the same in every tile
    within = ((place % PAGE) * place_stride).to(tl.int64)
    number = blocks + place // PAGE
    block = tl.load(number, mask=place < length, other=0)
    for _ in range(begin, end, TILE):
        source = (block.to(tl.int64) * block_stride + within)[:, None]
        # prefetch the block numbers of the next tile, so that its keys need not wait for them
        if has_whole_pages:
            number += TILE // PAGE
        else:
            within = ((place + TILE) % PAGE * place_stride).to(tl.int64)
            number = blocks + (place + TILE) // PAGE
        block = tl.load(number, mask=place + TILE < length, other=0)
        live = place < length
        key_live = dim_live
        if MASKED:
            key_live &= live[:, None]
        k = tl.load(keys + source, mask=key_live, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if TAIL > 0:
            q_tail, tail_keys, tail_mask = tail
            if MASKED:
                tail_mask &= live[:, None]
            k_tail = tl.load(tail_keys + source, mask=tail_mask, other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail.to(q.dtype)), scores, input_precision="ieee")
        if MASKED:
            sees = place[None, :] <= own_place[:, None]
            if WINDOW > 0:
                sees &= place[None, :] > own_place[:, None] - WINDOW
            scores = tl.where(sees, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = new_largest
        if MASKED:
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * scale - (shift * scale)[:, None])
        fading = tl.exp2((largest - shift) * scale)
        summed = summed * fading + tl.sum(weights, 1)
        v = k
        if TAIL == 0:
            v = tl.load(keys + part_stride + source, mask=key_live, other=0.0)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading[:, None], input_precision="ieee")
        largest = new_largest
        place += TILE
    return mixed, largest, summed


@triton.jit(do_not_specialize=["requests"], do_not_specialize_on_alignment=["rows", "lengths", "offsets"])
def _attend(
    query,
    cache,
    table,
    rows,
    lengths,
    offsets,
    out,
    scale,
    requests,
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
    WINDOW: tl.constexpr,
    REQUESTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    # request b's blocks are numbered from offsets[b] // TOKENS + b: enough numbers for it before the next request's
    numbered = tl.load(offsets + index, mask=index < requests, other=0) // TOKENS + index
    request = tl.sum(((numbered <= number) & (index < requests)).to(tl.int32), 0) - 1
    if request < 0:  # a block of tokens before the first request's
        return
    offset = tl.load(offsets + request)
    asked = tl.load(offsets + request + 1) - offset
    start = (number - offset // TOKENS - request) * TOKENS
    if start >= asked:
        return
    length = tl.load(lengths + request)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    token = start + row // GROUP
    row_live = (row < TOKENS * GROUP) & (token < asked)
    live = row_live[:, None] & (dim < HEAD_DIM)[None, :]
    own_place = length - asked + token
    whole_token = (offset + token).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    source = query + whole_token * query_token_stride + query_head * query_head_stride
    q = tl.load(source[:, None] + dim[None, :], mask=live, other=0.0)
    tail = ()
    if TAIL > 0:
        tail = tail_of(source, cache, row_live, HEAD_DIM, TAIL, TAIL_DIM)

    first_place = length - asked + start
    end = tl.minimum(first_place + TOKENS, length)
    if WINDOW > 0:
        begin = tl.maximum(first_place - WINDOW + 1, 0) // TILE * TILE
        clear = begin  # the window hides some key of nearly every tile
    else:
        begin = 0
        clear = (first_place + 1) // TILE * TILE
    blocks = table + tl.load(rows + request).to(tl.int64) * table_stride
    keys = cache + head * head_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    if WINDOW == 0:
        mixed, largest, summed = _attend_tiles(
            q,
            mixed,
            largest,
            summed,
            keys,
            part_stride,
            blocks,
            block_stride,
            place_stride,
            own_place,
            length,
            scale,
            begin,
            clear,
            tail,
            HEAD_DIM=HEAD_DIM,
            DIM=DIM,
            TAIL=TAIL,
            PAGE=PAGE,
            WINDOW=WINDOW,
            MASKED=False,
            TILE=TILE,
        )
    mixed, largest, summed = _attend_tiles(
        q,
        mixed,
        largest,
        summed,
        keys,
        part_stride,
        blocks,
        block_stride,
        place_stride,
        own_place,
        length,
        scale,
        clear,
        end,
        tail,
        HEAD_DIM=HEAD_DIM,
        DIM=DIM,
        TAIL=TAIL,
        PAGE=PAGE,
        WINDOW=WINDOW,
        MASKED=True,
        TILE=TILE,
    )
    target = out + (whole_token * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + dim[None, :]
    result = mixed / tl.where(summed > 0, summed, 1.0)[:, None]  # padding rows may see nothing
    tl.store(target, result.to(out.dtype.element_ty), mask=live)


def attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    scale: float | None,
    window: int,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    tokens, heads, head_dim = query.shape
    sizes = latent_tiles(query, cache) if value_dim else None
    if sizes is not None:  # a head for each tile of rows
        cache = cache.expand(-1, -1, heads // heads_of_tile(heads, 1, sizes.max_rows), -1, -1)
    _, _, kv_heads, page, _ = cache.shape
    requests, group = rows.shape[0], heads // kv_heads
    assert query.stride(2) == cache.stride(4) == table.stride(1) == 1
    block_rows, tile, warps, stages = NARROW if head_dim * query.element_size() <= 256 else WIDE
    if sizes is not None:
        block_rows, tile, warps, stages = sizes.max_rows, sizes.keys, sizes.warps, sizes.stages
    block_rows = max(block_rows, triton.next_power_of_2(group))
    block_tokens = block_rows // group
    out_dim = value_dim or head_dim
    if out is None:
        out = query.new_empty(tokens, heads, out_dim)
    assert out.is_contiguous()
    _attend[(kv_heads, tokens // block_tokens + requests)](
        query,
        cache,
        table,
        rows,
        lengths,
        offsets,
        out,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        requests,
        *query.stride()[:2],
        *cache.stride()[:4],
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=out_dim,
        DIM=triton.next_power_of_2(out_dim),
        PAGE=page,
        WINDOW=window,
        REQUESTS=max(256, request_bound(requests)),  # one kernel for nearly all servers
        TOKENS=block_tokens,
        ROWS=block_rows,
        TILE=tile,
        num_warps=warps,
        num_stages=stages,
        **tail_options(head_dim - out_dim),
        **launch_options(query),
    )
    return out
