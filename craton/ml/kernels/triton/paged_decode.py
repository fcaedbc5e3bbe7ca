"""Triton: decode attention over the paged KV cache: the last few tokens of each request, at memory bandwidth.

The work is split on the device into pieces: tiles of keys of one request and key/value head. Their size gives the GPU a
whole number of pieces per slot. So ragged lengths, few requests and many requests all fill the GPU, and the launch
decides nothing. A head in one piece is done when its program ends. Otherwise each piece stores a partial result with
the maximum and the sum of its softmax, and a second kernel merges them. The heads that share a key/value head, times
the queries of a request, are the rows of one matmul.

The KV cache of latent attention has keys only, shared by all heads: a key is a latent, which is also the value, and a
TAIL of rotated numbers. Rows that do not fit one matmul are several tiles, as of key/value heads at one address.

Of requests in a group with a shared prefix, the pieces begin after the shared tokens, always leave partial results, and
are merged with those of the prefix. The first programs of the same kernel compute these (`paged_shared`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.shared_prefixes import SharedPrefixes
from craton.ml.kernels.triton.latents import heads_of_tile, latent_tiles, tail_of, tail_options
from craton.ml.kernels.triton.launch import launch_options, processors, request_bound, wait_for_inputs
from craton.ml.kernels.triton.paged_shared import attend_prefix, pick, plan_prefixes, prefix_partials

# (keys of a tile, warps, stages of the pipeline, programs a multiprocessor runs) for keys of up to 256 bytes, and wider
NARROW, WIDE = (64, 4, 3, 3), (32, 4, 3, 3)
WHOLE_TILES = 2  # up to this a head is always one piece
LARGE_PIECE = 8  # tiles per piece above which more pieces per slot are preferred to larger ones
MAX_ROUNDS = 4  # maximum pieces per slot, for heads that are split
# The same where prefixes are shared: smaller pieces, because results are merged anyway and prefixes take some of the
# slots, which are fewer, because the programs of prefixes need more registers
SHARED_LARGE_PIECE, SHARED_MAX_ROUNDS, SHARED_PER_PROCESSOR = 2, 2, 2
# (partial results per iteration, warps, queries per program) of the merge, if all its programs run at once with one
# query each, and if they do not; the last where prefixes are shared
FAST_MERGE, LIGHT_MERGE, SHARED_MERGE = (16, 2, 1), (8, 1, 4), (4, 1, 4)
LATENT_MERGE = (8, 4, 2)  # of rows four times as wide
LOG2_E = 1.4426950408889634


@triton.jit
def _plan(
    lengths,
    skipped,
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
    SHARED: tl.constexpr,
):
    """For each request: its length, the token at which tiles begin (after those that its group shares), the first
    visible tile, the number of tiles from there, the pieces per head, and where its pieces end in the numbering of all.
    A request without tokens has no pieces.

    The GPU has `places` slots for pieces; with at most `rounds` pieces per slot, they are as large as that allows.
    """
    request = tl.arange(0, REQUESTS)
    length = tl.load(lengths + request, mask=request < requests, other=0)
    first = length * 0
    origin = first
    if SHARED:
        origin = tl.load(skipped + request, mask=request < requests, other=0)
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES - WINDOW + 1, 0) // BLOCK
    tiles = tl.cdiv(length - origin, BLOCK) - first
    pieces = (length > 0).to(tl.int32)
    if not WHOLE:
        total = tl.sum(tiles, 0) * KV_HEADS
        rounds = tl.minimum(tl.maximum(total // (places * LARGE), 1), rounds)
        size = tl.maximum(tl.cdiv(total, places * rounds), 1)
        pieces = tl.maximum((tiles + size // 2) // size, pieces)
    return length, origin, first, tiles, pieces, tl.cumsum(pieces, 0) * KV_HEADS


@triton.jit
def _add(largest, summed, mixed, partial, partial_sums, slots, live, DIM: tl.constexpr):
    """Add the partial results in `slots` [results, rows] to those of the rows: maximum, sum and weighted values."""
    theirs = tl.load(partial_sums + 2 * slots, mask=live, other=float("-inf"))
    sums = tl.load(partial_sums + 2 * slots + 1, mask=live, other=0.0)
    dim = tl.arange(0, DIM)[None, None, :]
    values = tl.load(partial + slots[:, :, None] * DIM + dim, mask=live[:, :, None], other=0.0)
    new_largest = tl.maximum(largest, tl.max(theirs, 0))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    fading = tl.exp2(largest - shift)
    weights = tl.exp2(theirs - shift[None, :])
    summed = summed * fading + tl.sum(sums * weights, 0)
    mixed = mixed * fading[:, None] + tl.sum(values * weights[:, :, None], 0)
    return new_largest, summed, mixed


@triton.jit(
    do_not_specialize=["requests", "rounds", "prefix_programs"],
    do_not_specialize_on_alignment=[
        *("rows", "lengths", "skipped", "members", "group_ends", "group_rows", "group_tokens"),
    ],
)
def _attend(
    query,
    cache,
    table,
    rows,
    lengths,
    skipped,
    members,
    group_ends,
    group_rows,
    group_tokens,
    out,
    partial,
    partial_sums,
    prefix_partial,
    prefix_sums,
    scale,
    requests,
    places,
    rounds,
    prefix_places,
    prefix_programs,
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
    TAIL: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    if SHARED:
        if program < prefix_programs:
            attend_prefix(
                program,
                query,
                cache,
                table,
                members,
                group_ends,
                group_rows,
                group_tokens,
                prefix_partial,
                prefix_sums,
                scale,
                prefix_places,
                query_token_stride,
                query_head_stride,
                block_stride,
                part_stride,
                head_stride,
                place_stride,
                table_stride,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                DIM,
                TAIL,
                TAIL_DIM,
                PAGE,
                GROUPS,
                PREFIX_ROWS,
                PREFIX_BLOCK,
                EARLY,
            )
            return
        program -= prefix_programs
    # Lengths, rows and table are older than the previous kernel, which stored this step's keys: no need to wait.
    length, origin, first, tiles, pieces, ends = _plan(
        lengths, skipped, requests, places, rounds, KV_HEADS, QUERIES, WINDOW, WHOLE, LARGE, REQUESTS, BLOCK, SHARED
    )
    # A program without work may end early, but not all of them: the next kernel waits only for the end of this one.
    if program >= tl.sum(pieces, 0) * KV_HEADS:
        if program == 0:
            wait_for_inputs(EARLY)
        return
    number = tl.arange(0, REQUESTS)
    table_row = tl.load(rows + number, mask=number < requests, other=0)
    request = tl.sum((ends <= program).to(tl.int32), 0)
    within = program - tl.max(tl.where(ends <= program, ends, 0), 0)
    length = pick(length, request, REQUESTS)
    first = pick(first, request, REQUESTS)
    tiles = pick(tiles, request, REQUESTS)
    pieces = tl.maximum(pick(pieces, request, REQUESTS), 1)
    blocks = table + pick(table_row, request, REQUESTS).to(tl.int64) * table_stride
    head = within // pieces
    piece = within % pieces
    begin = first + piece * tiles // pieces
    end = first + (piece + 1) * tiles // pieces
    column = tl.arange(0, BLOCK)
    place = begin * BLOCK + column
    is_whole = pieces == 1
    if SHARED:
        origin = pick(origin, request, REQUESTS)
        place += origin
        is_whole = is_whole & (origin == 0)
    block = tl.load(blocks + place // PAGE, mask=place < length, other=0)
    wait_for_inputs(EARLY)

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
    if TAIL > 0:
        q_tail, tail_keys, tail_live = tail_of(asked, cache, row_live, HEAD_DIM, TAIL, TAIL_DIM)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    summed = tl.zeros([ROWS, BLOCK], tl.float32)  # summed over columns at the end, because that synchronizes the warps
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(begin, end):
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
        sees = place[None, :] <= own_place
        if WINDOW > 0:
            sees &= place[None, :] > own_place - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        fading = tl.exp2(largest - shift)[:, None]
        summed = summed * fading + weights
        v = k
        if TAIL == 0:
            v = tl.load(keys + part_stride + source, mask=key_live, other=0.0)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * fading, input_precision="ieee")
        largest = new_largest
        place += BLOCK
    total = tl.sum(summed, 1)
    if is_whole:
        target = out + (token * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + dim[None, :]
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=row_live[:, None] & dim_live)
    else:
        slot = program * (GROUP * QUERIES) + row
        tl.store(partial + slot[:, None] * DIM + dim[None, :], mixed, mask=row_live[:, None])
        tl.store(partial_sums + 2 * slot, largest, mask=row_live)
        tl.store(partial_sums + 2 * slot + 1, total, mask=row_live)


@triton.jit(
    do_not_specialize=["requests", "rounds"],
    do_not_specialize_on_alignment=["lengths", "skipped", "member_places", "group_ends", "group_tokens"],
)
def _merge(
    lengths,
    skipped,
    member_places,
    group_ends,
    group_tokens,
    out,
    partial,
    partial_sums,
    prefix_partial,
    prefix_sums,
    requests,
    places,
    rounds,
    prefix_places,
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
    ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    request = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_live = row < GROUP * QUERIES
    _length, _origin, _first, _tiles, pieces, ends = _plan(
        lengths, skipped, requests, places, rounds, KV_HEADS, QUERIES, WINDOW, WHOLE, LARGE, REQUESTS, BLOCK, SHARED
    )
    pieces = pick(pieces, request, REQUESTS)
    begin = pick(ends, request, REQUESTS) - (KV_HEADS - head) * pieces
    is_partial = pieces > 1
    if SHARED:
        member = tl.load(member_places + request)
        is_partial = is_partial | (member >= 0)
        first, _end, _tokens, query_tiles, splits, program_ends = plan_prefixes(
            group_ends, group_tokens, prefix_places, KV_HEADS, GROUP, PREFIX_ROWS, PREFIX_BLOCK, GROUPS
        )
        group = tl.sum((tl.load(group_ends + tl.arange(0, GROUPS)) <= member).to(tl.int32), 0)
        query_tiles = pick(query_tiles, group, GROUPS)
        splits = tl.where(member >= 0, pick(splits, group, GROUPS), 0)
        entry = (member - pick(first, group, GROUPS)) * GROUP + row
        program = pick(program_ends, group, GROUPS) - (KV_HEADS - head) * splits * query_tiles + entry // PREFIX_ROWS
    if is_partial | (tl.program_id(0) == 0):
        wait_for_inputs(EARLY)
    if is_partial:
        dim = tl.arange(0, DIM)
        step = tl.arange(0, STEP)[:, None]
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        summed = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(0, pieces, STEP):
            piece = start + step
            live = (piece < pieces) & row_live[None, :]
            slots = (begin + piece) * (GROUP * QUERIES) + row[None, :]
            largest, summed, mixed = _add(largest, summed, mixed, partial, partial_sums, slots, live, DIM)
        if SHARED:
            for start in range(0, splits, STEP):
                split = start + step
                live = (split < splits) & row_live[None, :]
                slots = (program[None, :] + split * query_tiles).to(tl.int64) * PREFIX_ROWS + (entry % PREFIX_ROWS)[
                    None, :
                ]
                largest, summed, mixed = _add(largest, summed, mixed, prefix_partial, prefix_sums, slots, live, DIM)
        token = request.to(tl.int64) * QUERIES + row // GROUP
        target = out + (token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
        result = mixed / tl.where(summed > 0, summed, 1.0)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=row_live[:, None] & (dim < HEAD_DIM)[None, :])


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
    value_dim: int = 0,
    shared: SharedPrefixes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    requests = rows.shape[0]
    tokens, heads, head_dim = query.shape
    sizes = latent_tiles(query, cache) if value_dim else None
    if sizes is not None:  # a head for each tile of rows
        cache = cache.expand(-1, -1, heads // heads_of_tile(heads, queries, sizes.max_rows), -1, -1)
    _, _, kv_heads, page, _ = cache.shape
    group = heads // kv_heads
    assert query.stride(2) == cache.stride(4) == table.stride(1) == 1
    assert query.shape[0] == requests * queries
    assert shared is None or (queries == 1 and not window)
    out_dim = value_dim or head_dim
    dim = triton.next_power_of_2(out_dim)
    block, warps, stages, per_processor = NARROW if head_dim * query.element_size() <= 256 else WIDE
    if sizes is not None:
        block, warps, stages, per_processor = sizes.keys, sizes.warps, sizes.stages, 1
    places = processors(query.device) * (per_processor if shared is None else min(per_processor, SHARED_PER_PROCESSOR))
    tiles = triton.cdiv(longest, block)
    whole = tiles <= WHOLE_TILES and shared is None
    all_heads = requests * kv_heads
    large, max_rounds = (LARGE_PIECE, MAX_ROUNDS) if shared is None else (SHARED_LARGE_PIECE, SHARED_MAX_ROUNDS)
    rounds = min(max_rounds, max(1, all_heads * tiles // (places * large)))
    programs = all_heads if whole else min(all_heads * tiles, all_heads + places * rounds)
    slots = 0 if whole else programs
    if out is None:
        out = query.new_empty(tokens, heads, out_dim)
    assert out.is_contiguous()
    partial = torch.empty(slots, group * queries, dim, dtype=torch.float32, device=query.device)
    partial_sums = torch.empty(slots, group * queries, 2, dtype=torch.float32, device=query.device)
    scale_log2 = (head_dim**-0.5 if scale is None else scale) * LOG2_E
    options = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "HEAD_DIM": out_dim,
        "DIM": dim,
        "WINDOW": window,
        "WHOLE": whole,
        "LARGE": large,
        "REQUESTS": request_bound(requests),
        "BLOCK": block,
        **launch_options(query),
    }
    skipped = members = member_places = group_ends = group_rows = group_tokens = lengths
    prefix_sums, prefix_programs, prefix_places = partial_sums, 0, places
    prefix_partial = partial
    if shared is None:
        options |= {"SHARED": False, "GROUPS": 1, "PREFIX_ROWS": 1, "PREFIX_BLOCK": 1}
    else:
        prefix = prefix_partials(query, kv_heads, shared, dim, sizes)
        skipped, members, member_places = shared.skipped, shared.members, shared.places
        group_ends, group_rows, group_tokens = shared.ends, shared.rows, shared.tokens
        prefix_partial, prefix_sums = prefix.partial, prefix.sums
        prefix_programs, prefix_places = prefix.programs, prefix.places
        options |= {"SHARED": True, "GROUPS": len(shared.ends)}
        options |= {"PREFIX_ROWS": prefix.rows, "PREFIX_BLOCK": prefix.block}
    _attend[(prefix_programs + programs,)](
        query,
        cache,
        table,
        rows,
        lengths,
        skipped,
        members,
        group_ends,
        group_rows,
        group_tokens,
        out,
        partial,
        partial_sums,
        prefix_partial,
        prefix_sums,
        scale_log2,
        requests,
        places,
        rounds,
        prefix_places,
        prefix_programs,
        *query.stride()[:2],
        *cache.stride()[:4],
        table.stride(0),
        PAGE=page,
        ROWS=max(16, triton.next_power_of_2(group * queries)),
        num_warps=warps,
        num_stages=stages,
        **tail_options(head_dim - out_dim),
        **options,
    )
    if not whole:
        merge = LIGHT_MERGE if shared is None else SHARED_MERGE
        merge = FAST_MERGE if all_heads * group * queries <= places else merge
        step, merge_warps, rows_each = merge if sizes is None else LATENT_MERGE
        _merge[(all_heads, triton.cdiv(group * queries, rows_each))](
            lengths,
            skipped,
            member_places,
            group_ends,
            group_tokens,
            out,
            partial,
            partial_sums,
            prefix_partial,
            prefix_sums,
            requests,
            places,
            rounds,
            prefix_places,
            STEP=step,
            ROWS=rows_each,
            num_warps=merge_warps,
            **options,
        )
    return out
