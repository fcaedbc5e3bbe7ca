"""Triton: sample the next token and its log-probability from logits that are read once, with the sampling noise.

A row's vocabulary is cut into parts. Each part gives its best token and its partial softmax, which a second kernel
merges.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.libdevice import fast_logf

from craton.ml.kernels import sampling_hash
from craton.ml.kernels.triton.launch import launch_options, processors, wait_for_inputs

LANES, WIDTH, WARPS = 128, 8, 4  # of a tile: WIDTH tokens per lane
PROGRAMS_PER_PROCESSOR = 16
# Constants of the hash and the temperature, shared with the PyTorch twin.
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (tl.constexpr(number) for number in sampling_hash.MULTIPLIERS)
FIRST_KEY, SECOND_KEY = (tl.constexpr(number) for number in sampling_hash.ROW_KEYS)
MIN_TEMPERATURE = tl.constexpr(sampling_hash.MIN_TEMPERATURE)


@triton.jit
def _mix(number):
    number ^= number >> 16
    number *= FIRST_MULTIPLIER
    number ^= number >> 15
    number *= SECOND_MULTIPLIER
    return number ^ (number >> 16)


@triton.jit
def row_key(seed, position, START: tl.constexpr):
    key = _mix(seed.to(tl.uint32) ^ START)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position.to(tl.uint32))
    return _mix(key ^ (position >> 32).to(tl.uint32))


@triton.jit
def _log(value, FAST: tl.constexpr):
    if FAST:
        return fast_logf(value)  # 22 bits of precision with a fifth of the instructions
    return tl.log(value)


@triton.jit
def gumbel_noise(token, first_key, second_key, FAST: tl.constexpr):
    bits = _mix(_mix(token.to(tl.uint32) + first_key) ^ second_key)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    # -log(1 - uniform), by its series where 1 - uniform would lose digits
    series = uniform * (1 + uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.015625, series, -_log(1 - uniform, FAST))
    return -_log(exponential, FAST)


@triton.jit
def inverse_temperature(temperatures, row):
    """Return 1 / temperature of a row; 1 for one that is too small to divide by."""
    temperature = tl.load(temperatures + row)
    return 1.0 / tl.where(temperature >= MIN_TEMPERATURE, temperature, 1.0)


@triton.jit(
    do_not_specialize=["part_tiles"],
    do_not_specialize_on_alignment=["temperatures", "logprob_temperatures", "seeds", "positions"],
)
def _choose_part(
    logits,
    temperatures,
    logprob_temperatures,
    seeds,
    positions,
    scores,
    tokens,
    sums,
    stride,
    vocabulary,
    part_tiles,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Per part: the best score with its token; the largest scaled logit and Σ exp(scaled logit - largest), scaled for
    the log-probability.

    Each lane keeps its own values until the end, so threads exchange nothing on the way.
    """
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    hot = tl.load(temperatures + row) >= MIN_TEMPERATURE
    coolness = inverse_temperature(temperatures, row)
    scale = inverse_temperature(logprob_temperatures, row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    first_key = row_key(seed, position, FIRST_KEY)
    second_key = row_key(seed, position, SECOND_KEY)
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full([LANES], float("-inf"), tl.float32)
    summed = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES, WIDTH], float("-inf"), tl.float32)
    best_token = tl.zeros([LANES, WIDTH], tl.int32) + part * part_tiles * (LANES * WIDTH)
    for tile in range(part * part_tiles, (part + 1) * part_tiles):
        token = tile * (LANES * WIDTH) + lane
        logit = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        scaled = logit * scale
        new_largest = tl.maximum(largest, tl.max(scaled, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        summed = summed * tl.exp(largest - shift) + tl.sum(tl.exp(scaled - shift[:, None]), 1)
        largest = new_largest
        score = logit * coolness
        if hot:
            score += gumbel_noise(token, first_key, second_key, FAST)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    top = tl.max(largest, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    winner = tl.max(tl.max(best, 1), 0)
    first = tl.where(best == winner, best_token, 2147483647)  # the first of equal ones
    entry = row * tl.num_programs(1) + part
    tl.store(scores + entry, winner)
    tl.store(tokens + entry, tl.min(tl.min(first, 1), 0))
    tl.store(sums + 2 * entry, top)
    tl.store(sums + 2 * entry + 1, tl.sum(summed * tl.exp(largest - shift), 0))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["logprob_temperatures"])
def _choose(
    logits,
    logprob_temperatures,
    scores,
    tokens,
    sums,
    chosen,
    logprobs,
    stride,
    parts,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    live = part < parts
    entry = row * parts + part
    score = tl.load(scores + entry, mask=live, other=float("-inf"))
    token = tl.load(tokens + entry, mask=live, other=0)
    theirs = tl.load(sums + 2 * entry, mask=live, other=float("-inf"))
    summed = tl.load(sums + 2 * entry + 1, mask=live, other=0.0)
    winner = tl.argmax(score, 0)
    best_token = tl.sum(tl.where(part == winner, token, 0), 0)
    largest = tl.max(theirs, 0)
    total = tl.sum(summed * tl.exp(theirs - largest), 0)  # NaN if a logit is NaN or the largest is not finite
    scaled = tl.load(logits + row * stride + best_token).to(tl.float32) * inverse_temperature(logprob_temperatures, row)
    logprob = scaled - largest - tl.log(total)
    sound = total == total
    tl.store(chosen + row, tl.where(sound, best_token, -1).to(tl.int64))
    tl.store(logprobs + row, tl.where(sound, logprob, float("nan")))


def choose(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, logprob_temperature: Tensor
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    tiles = triton.cdiv(vocabulary, LANES * WIDTH)
    parts = min(tiles, triton.cdiv(PROGRAMS_PER_PROCESSOR * processors(logits.device), rows))
    part_tiles = triton.cdiv(tiles, parts)
    parts = triton.cdiv(tiles, part_tiles)
    scores = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, parts, 2, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    options = launch_options(logits)
    _choose_part[(rows, parts)](
        logits,
        temperature,
        logprob_temperature,
        seeds,
        positions,
        scores,
        tokens,
        sums,
        logits.stride(0),
        vocabulary,
        part_tiles,
        LANES=LANES,
        WIDTH=WIDTH,
        FAST=logits.is_cuda,
        num_warps=WARPS,
        **options,
    )
    _choose[(rows,)](
        logits,
        logprob_temperature,
        scores,
        tokens,
        sums,
        chosen,
        logprobs,
        logits.stride(0),
        parts,
        PARTS=triton.next_power_of_2(tiles),
        num_warps=1,
        **options,
    )
    return chosen, logprobs
