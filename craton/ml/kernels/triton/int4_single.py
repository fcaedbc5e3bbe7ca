"""Triton: the matmul of one row with a 4-bit weight, bound by reading the weight.

A masked nibble is the bits of a subnormal fp32 number, which GPUs multiply at full speed. So a weight takes two
instructions, a mask and a multiplication that adds, with the row scaled by powers of two; numbers of the row beyond 2⁵¹
overflow. Zero points are subtracted from the sums of a group, and its scale is applied to them: no weight is rounded.
The first tile of the weight loads before the row is ready.
"""

from __future__ import annotations

import triton
import triton.language as tl

from craton.ml.kernels.triton.launch import wait_for_inputs

LOWERED = tl.constexpr(2.0**73)  # undoes the scaling of the row and the codes


@triton.jit
def _code(words, NIBBLE: tl.constexpr):
    """A code as the subnormal number code · 2^(its place - 149); three of eight share a shift."""
    moved = words if NIBBLE < 5 else words >> 12
    return (moved & (15 << (4 * NIBBLE - (12 if NIBBLE >= 5 else 0)))).to(tl.float32, bitcast=True)


@triton.jit
def _raised(value, NIBBLE: tl.constexpr):
    """value · 2^(76 - place): times the subnormal code, 2^-73 · value · code, which is normal."""
    return value * 2.0 ** (76 - 4 * NIBBLE + (12 if NIBBLE >= 5 else 0))


@triton.jit
def _of_outs(base, place, stride, outs, live, FIRST: tl.constexpr, STEP: tl.constexpr, OUTS: tl.constexpr):
    """Load `place` of every STEP-th output from FIRST on; the outputs are the last dimensions, of size 2."""
    if STEP == OUTS:
        out = (tl.program_id(0) * OUTS + FIRST) % outs
        result = tl.load(base + out.to(tl.int64) * stride + place, mask=live, other=0)
    else:
        result = tl.join(
            _of_outs(base, place, stride, outs, live, FIRST, 2 * STEP, OUTS),
            _of_outs(base, place, stride, outs, live, FIRST + STEP, 2 * STEP, OUTS),
        )
    return result


@triton.jit
def _of_groups(base, group, groups, outs, live, OUTS: tl.constexpr):
    """[OUTS, places] numbers of groups, each loaded by the thread that needs it, in fp32."""
    joined = _of_outs(base, group, groups, outs, live, 0, 1, OUTS)
    return tl.trans(tl.reshape(joined, [group.shape[0], OUTS])).to(tl.float32)


@triton.jit(do_not_specialize=["outs"])
def single(
    x,
    words,
    scale,
    zero,
    other_words,
    other_scale,
    other_zero,
    bias,
    out,
    columns,
    outs,
    GATED: tl.constexpr,
    ZEROED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTS: tl.constexpr,
    UNITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    index = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    num_words, groups = tl.cdiv(columns, 128) * 16, columns // GROUP
    word = tl.arange(0, UNITS * 16)
    unit = tl.arange(0, UNITS * 4) // 4  # of four words
    place = (index % outs).to(tl.int64)[:, None] * num_words + word[None, :]
    of_x = word // 16 * 128 + word % 16
    live = (EVEN | (word < num_words))[None, :]
    tile = tl.load(words + place, mask=live, other=0, eviction_policy="evict_first")
    if GATED:
        other_tile = tl.load(other_words + place, mask=live, other=0, eviction_policy="evict_first")
    wait_for_inputs(EARLY)
    total = tl.zeros([OUTS, UNITS * 4], tl.float32)
    other_total = tl.zeros([OUTS, UNITS * 4], tl.float32)
    for start in range(0, columns, UNITS * 128):
        following = start // 8 + UNITS * 16
        more = (following + word < num_words)[None, :]
        next_tile = tl.load(words + place + following, mask=more, other=0, eviction_policy="evict_first")
        if GATED:
            next_other = tl.load(other_words + place + following, mask=more, other=0, eviction_policy="evict_first")
        for part in tl.static_range(GROUPS):  # the groups of a unit
            column = start + unit * 128 + part * (128 // GROUPS)
            group, here = column // GROUP, EVEN | (column < columns)
            by = _of_groups(scale, group, groups, outs, here, OUTS)
            point = _of_groups(zero, group, groups, outs, here, OUTS) if ZEROED else 8.0
            if GATED:
                other_by = _of_groups(other_scale, group, groups, outs, here, OUTS)
                other_point = _of_groups(other_zero, group, groups, outs, here, OUTS) if ZEROED else 8.0
            plain = tl.zeros([UNITS * 16], tl.float32)
            sums = tl.zeros([OUTS, UNITS * 16], tl.float32)
            other_sums = tl.zeros([OUTS, UNITS * 16], tl.float32)
            for nibble in tl.static_range(part * (8 // GROUPS), (part + 1) * (8 // GROUPS)):
                column = start + nibble * 16 + of_x
                value = tl.load(x + column, mask=EVEN | (column < columns), other=0.0).to(tl.float32)
                plain += value
                raised = _raised(value, nibble)[None, :]
                sums += _code(tile, nibble) * raised
                if GATED:
                    other_sums += _code(other_tile, nibble) * raised
            plain_sum = tl.sum(tl.reshape(plain, [UNITS * 4, 4]), 1)[None, :]  # a thread holds each four
            total += (tl.sum(tl.reshape(sums, [OUTS, UNITS * 4, 4]), 2) * LOWERED - point * plain_sum) * by
            if GATED:
                other_sum = tl.sum(tl.reshape(other_sums, [OUTS, UNITS * 4, 4]), 2)
                other_total += (other_sum * LOWERED - other_point * plain_sum) * other_by
        tile = next_tile
        if GATED:
            other_tile = next_other
    live = index < outs
    result = tl.sum(total, 1)
    if BIASED:
        result += tl.load(bias + index, mask=live, other=0.0).to(tl.float32)
    if GATED:
        result = result / (1 + tl.exp(-result)) * tl.sum(other_total, 1)
    tl.store(out + index, result.to(out.dtype.element_ty), mask=live)
