"""Triton: sample the next token from the tokens that top-k, top-p and min-p keep, without sorting the vocabulary.

Tokens are kept from some logit upwards, so the best noisy score among the kept ones is found by elimination: take the
best of all; if its token is not kept, none with a logit as low is, so take the best of the tokens above it. A pass over
the row weighs the tokens above the candidate, which decides on it, and finds the next one. The first candidate is kept
with the probability of all kept tokens. Only top-k together with top-p, and log-probabilities of what is kept, need
the lowest kept logit itself: it is searched with several pivots per pass. One program reads a whole row in a fixed
order, so a token does not depend on the other rows of its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.choose import (
    FIRST_KEY,
    MIN_TEMPERATURE,
    SECOND_KEY,
    gumbel_noise,
    inverse_temperature,
    row_key,
)
from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

LANES, WIDTH, WARPS = 512, 8, 16  # of a tile: WIDTH tokens per lane
PIVOTS = 4  # of one pass of a search for the lowest logit that is kept
# low bits of an fp32 number that are the same for all values of a dtype; a search need not try them
EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _key(logit, SHIFT: tl.constexpr):
    """Map a logit to an int32 of the same order; -0 counts as 0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _tile(logits, tile, vocabulary, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the tokens of a tile and their logits, [LANES, WIDTH]."""
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token = tile * (LANES * WIDTH) + lane
    return token, tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(logit, top, coolness, by_mass):
    """Return the weight of a token: its probability as a share of the likeliest one's, or 1 to count tokens."""
    return tl.where(by_mass, tl.exp((logit - top) * coolness), 1.0)


@triton.jit
def _first_of_best(best, best_token):
    winner = tl.max(tl.max(best, 1), 0)
    return tl.min(tl.min(tl.where(best == winner, best_token, 2147483647), 1), 0)


@triton.jit
def _survey(
    logits,
    hot,
    coolness,
    first_key,
    second_key,
    vocabulary,
    tiles,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the token with the best score, the largest logit, Σ exp(logit - largest), and the sum of the weights."""
    largest = tl.full([LANES], float("-inf"), tl.float32)
    model = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES, WIDTH], float("-inf"), tl.float32)
    best_token = tl.zeros([LANES, WIDTH], tl.int32)
    for tile in range(tiles):
        token, logit = _tile(logits, tile, vocabulary, LANES, WIDTH)
        new_largest = tl.maximum(largest, tl.max(logit, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        model = model * tl.exp(largest - shift) + tl.sum(tl.exp(logit - shift[:, None]), 1)
        total = total * tl.exp((largest - shift) * coolness)
        total += tl.sum(tl.exp((logit - shift[:, None]) * coolness), 1)
        largest = new_largest
        score = logit * coolness
        if hot:
            score += gumbel_noise(token, first_key, second_key, FAST)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    top = tl.max(largest, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    model_sum = tl.sum(model * tl.exp(largest - shift), 0)
    total_sum = tl.sum(total * tl.exp((largest - shift) * coolness), 0)
    return _first_of_best(best, best_token), top, model_sum, total_sum


@triton.jit
def _above(
    logits,
    bound,
    lowest,
    by_mass,
    top,
    coolness,
    first_key,
    second_key,
    vocabulary,
    tiles,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Of the tokens above a key: return their weight, and the best of those that min-p keeps."""
    weight = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES, WIDTH], float("-inf"), tl.float32)
    best_token = tl.zeros([LANES, WIDTH], tl.int32)
    for tile in range(tiles):
        token, logit = _tile(logits, tile, vocabulary, LANES, WIDTH)
        above = _key(logit, SHIFT) > bound
        if tl.max(tl.max(above.to(tl.int32), 1), 0) > 0:  # few tiles have one, and the noise costs most
            weight += tl.sum(tl.where(above, _weight(logit, top, coolness, by_mass), 0.0), 1)
            score = logit * coolness + gumbel_noise(token, first_key, second_key, FAST)
            better = above & ((logit - top) * coolness >= lowest) & (score > best)
            best = tl.where(better, score, best)
            best_token = tl.where(better, token, best_token)
    return tl.sum(weight, 0), _first_of_best(best, best_token)


@triton.jit
def _kept_mass(
    logits,
    bound,
    lowest,
    top,
    coolness,
    vocabulary,
    tiles,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return Σ exp(scaled logit - largest) of the tokens above a key that min-p keeps."""
    mass = tl.zeros([LANES], tl.float32)
    for tile in range(tiles):
        _, logit = _tile(logits, tile, vocabulary, LANES, WIDTH)
        distance = (logit - top) * coolness
        mass += tl.sum(tl.where((_key(logit, SHIFT) > bound) & (distance >= lowest), tl.exp(distance), 0.0), 1)
    return tl.sum(mass, 0)


@triton.jit
def _search(
    logits,
    low,
    high,
    limit,
    by_mass,
    top,
    coolness,
    vocabulary,
    tiles,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the key above which tokens are kept: a key is kept where the weight of the tokens above it is below the
    limit. `low` is not kept, `high` is."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivot = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        weights = tl.zeros([LANES, PIVOTS], tl.float32)
        for tile in range(tiles):
            _, logit = _tile(logits, tile, vocabulary, LANES, WIDTH)
            above = _key(logit, SHIFT)[:, :, None] > pivot.to(tl.int32)[None, None, :]
            weights += tl.sum(tl.where(above, _weight(logit, top, coolness, by_mass)[:, :, None], 0.0), 1)
        weight = tl.sum(weights, 0)
        kept = (weight < limit) | (pivot == high)  # another sum must not be rounded to another verdict on `high`
        low = tl.maximum(low, tl.max(tl.where(kept, low, pivot), 0))
        high = tl.minimum(high, tl.min(tl.where(kept, pivot, high), 0))
        # of top_k tokens above a pivot all are kept, and no other is
        exact = tl.min(tl.where(kept, float("inf"), weight), 0) == limit
        high = tl.where(exact & (by_mass == 0), low + 1, high)
    return low.to(tl.int32)


@triton.jit(
    do_not_specialize=["tiles"],
    do_not_specialize_on_alignment=[
        "temperatures",
        "logprob_temperatures",
        "seeds",
        "positions",
        "top_ks",
        "top_ps",
        "min_ps",
    ],
)
def _choose_kept(
    logits,
    temperatures,
    logprob_temperatures,
    seeds,
    positions,
    top_ks,
    top_ps,
    min_ps,
    chosen,
    logprobs,
    stride,
    vocabulary,
    tiles,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    hot = tl.load(temperatures + row) >= MIN_TEMPERATURE
    coolness = inverse_temperature(temperatures, row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    first_key = row_key(seed, position, FIRST_KEY)
    second_key = row_key(seed, position, SECOND_KEY)
    token, top, model, total = _survey(
        logits, hot, coolness, first_key, second_key, vocabulary, tiles, LANES, WIDTH, FAST
    )
    # The sum is NaN if a logit is; a score of the likeliest token that is not finite would end no elimination.
    sound = (model == model) & (tl.abs(top * coolness) < float("inf"))
    token = tl.where(sound, token, 0)
    logit = tl.load(logits + token).to(tl.float32)
    scale = tl.full([], 1.0, tl.float32)
    mass = model
    if hot & sound:
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        # -inf for a min-p of 0; one above 1 would keep no token, and the loop below would not end
        lowest = tl.minimum(tl.log(tl.load(min_ps + row)), 0.0)
        by_count = (top_k > 0) & (top_k < vocabulary)
        by_mass = top_p < 1
        limit = tl.where(by_mass, top_p * total, tl.where(by_count, top_k.to(tl.float32), float("inf")))
        bound = _key(tl.full([], float("-inf"), tl.float32), SHIFT)
        if by_count & by_mass:  # top-p is a share of what top-k keeps
            bound = _search(
                logits,
                bound,
                _key(top, SHIFT),
                top_k.to(tl.float32),
                False,
                top,
                coolness,
                vocabulary,
                tiles,
                SHIFT,
                PIVOTS,
                LANES,
                WIDTH,
            )
            limit = top_p * _kept_mass(
                logits, bound, float("-inf"), top, coolness, vocabulary, tiles, SHIFT, LANES, WIDTH
            )
        is_cut = limit < float("inf")
        searching = is_cut | ((logit - top) * coolness < lowest)
        while searching:
            key = _key(logit, SHIFT)
            weight, best = _above(
                logits,
                tl.maximum(key, bound),
                lowest,
                by_mass,
                top,
                coolness,
                first_key,
                second_key,
                vocabulary,
                tiles,
                SHIFT,
                LANES,
                WIDTH,
                FAST,
            )
            is_kept = (key > bound) & (weight < limit) & ((logit - top) * coolness >= lowest)
            searching = (is_kept == 0) & (weight > 0)  # nothing is above the likeliest token, which is always kept
            if searching:
                token = best
                logit = tl.load(logits + token).to(tl.float32)
                searching = is_cut  # else min-p alone decides, and it keeps the best
        if tl.load(logprob_temperatures + row) >= MIN_TEMPERATURE:
            if is_cut:
                bound = _search(
                    logits,
                    bound,
                    _key(logit, SHIFT),
                    limit,
                    by_mass,
                    top,
                    coolness,
                    vocabulary,
                    tiles,
                    SHIFT,
                    PIVOTS,
                    LANES,
                    WIDTH,
                )
            mass = _kept_mass(logits, bound, lowest, top, coolness, vocabulary, tiles, SHIFT, LANES, WIDTH)
            scale = coolness
    logprob = (logit - top) * scale - tl.log(mass)
    tl.store(chosen + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(logprobs + row, tl.where(sound, logprob, float("nan")))


def choose_kept(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    logprob_temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # One kernel for all combinations, which takes values that keep everything: another would be compiled while serving.
    _choose_kept[(rows,)](
        logits,
        temperature,
        logprob_temperature,
        seeds,
        positions,
        torch.zeros_like(seeds) if top_k is None else top_k,
        torch.ones_like(temperature) if top_p is None else top_p,
        torch.zeros_like(temperature) if min_p is None else min_p,
        chosen,
        logprobs,
        logits.stride(0),
        vocabulary,
        triton.cdiv(vocabulary, LANES * WIDTH),
        SHIFT=EMPTY_BITS[logits.dtype],
        PIVOTS=PIVOTS,
        LANES=LANES,
        WIDTH=WIDTH,
        FAST=logits.is_cuda,
        num_warps=WARPS,
        **launch_options(logits),
    )
    return chosen, logprobs
