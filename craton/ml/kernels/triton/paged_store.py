"""Triton: store this step's keys and values in the pages of one layer's KV cache.

`store_rotated` also splits the fused projection, and norms and rotates queries and keys: everything between the
projection and attention in one pass over memory. `store_latents` norms and rotates what latent attention caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from craton.ml.kernels.triton.launch import launch_options, wait_for_inputs

TILE, WARPS = 512, 2  # elements of one head's tokens in a program
LATENT_WARPS = 4  # of a program that stores one token's latents


@triton.jit
def _norm(first, second, weight, column, epsilon, HALF: tl.constexpr):
    """Norm halves of heads [tokens, HALF] in fp32 and round them to their original dtype."""
    inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + epsilon)[:, None]
    first_weight = tl.load(weight + column).to(tl.float32)[None, :]
    second_weight = tl.load(weight + HALF + column).to(tl.float32)[None, :]
    return first * inverse * first_weight, second * inverse * second_weight


@triton.jit
def _fit(value, LARGEST: tl.constexpr):
    if LARGEST > 0:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -LARGEST), LARGEST)
    return value


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _store_rotated(
    qkv,
    cosine,
    sine,
    q_weight,
    k_weight,
    epsilon,
    cache,
    slots,
    query,
    tokens,
    block_stride,
    part_stride,
    head_stride,
    place_stride,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM_QUERY: tl.constexpr,
    NORM_KEY: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    group = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = (token < tokens)[:, None]
    column = tl.arange(0, HALF)
    angle = token[:, None] * HALF + column[None, :]
    cos = tl.load(cosine + angle, mask=live, other=0.0)
    sin = tl.load(sine + angle, mask=live, other=0.0)
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    place = (slot // PAGE) * block_stride + (slot % PAGE) * place_stride + group * head_stride
    width: tl.constexpr = 2 * HALF
    source = qkv + (token * KV_HEADS + group)[:, None] * (QUERIES + 2) * width + column[None, :]
    rounded = qkv.dtype.element_ty
    stored = cache.dtype.element_ty
    for part in tl.static_range(QUERIES + 2):
        first = tl.load(source + part * width, mask=live, other=0.0)
        second = tl.load(source + part * width + HALF, mask=live, other=0.0)
        if part <= QUERIES:
            first_float = first.to(tl.float32)
            second_float = second.to(tl.float32)
            if part < QUERIES and NORM_QUERY:
                first_float, second_float = _norm(first_float, second_float, q_weight, column, epsilon, HALF)
            if part == QUERIES and NORM_KEY:
                first_float, second_float = _norm(first_float, second_float, k_weight, column, epsilon, HALF)
            first_float = first_float.to(rounded).to(tl.float32)
            second_float = second_float.to(rounded).to(tl.float32)
            first = (first_float * cos - second_float * sin).to(rounded)
            second = (second_float * cos + first_float * sin).to(rounded)
        if part < QUERIES:
            target = query + ((token * KV_HEADS + group) * QUERIES + part)[:, None] * width + column[None, :]
            tl.store(target, first, mask=live)
            tl.store(target + HALF, second, mask=live)
        else:
            target = cache + (place + (part - QUERIES) * part_stride)[:, None] + column[None, :]
            tl.store(target, _fit(first, LARGEST).to(stored), mask=live)
            tl.store(target + HALF, _fit(second, LARGEST).to(stored), mask=live)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store(
    key,
    value,
    cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    part_stride,
    head_stride,
    place_stride,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < HEAD_DIM
    slot = tl.load(slots + token)
    target = cache + (slot // PAGE) * block_stride + (slot % PAGE) * place_stride + head * head_stride + column
    stored = cache.dtype.element_ty
    element = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=live, other=0.0)
    tl.store(target, _fit(element, LARGEST).to(stored), mask=live)
    element = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=live, other=0.0)
    tl.store(target + part_stride, _fit(element, LARGEST).to(stored), mask=live)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_latents(
    compressed,
    cosine,
    sine,
    weight,
    epsilon,
    cache,
    slots,
    token_stride,
    block_stride,
    place_stride,
    KV_LORA: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    live = column < KV_LORA
    norm_weight = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    source = compressed + token * token_stride
    target = cache + (slot // PAGE) * block_stride + (slot % PAGE) * place_stride
    rounded = compressed.dtype.element_ty
    stored = cache.dtype.element_ty
    latent = tl.load(source + column, mask=live, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(latent * latent, 0) / KV_LORA + epsilon)
    tl.store(target + column, _fit((latent * inverse * norm_weight).to(rounded), LARGEST).to(stored), mask=live)
    pair = tl.arange(0, HALF_BLOCK)
    pair_live = pair < HALF
    cos = tl.load(cosine + token * HALF + pair, mask=pair_live, other=0.0)
    sin = tl.load(sine + token * HALF + pair, mask=pair_live, other=0.0)
    first = tl.load(source + KV_LORA + pair, mask=pair_live, other=0.0).to(tl.float32)
    second = tl.load(source + KV_LORA + HALF + pair, mask=pair_live, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(rounded)
    tl.store(target + KV_LORA + pair, _fit(turned, LARGEST).to(stored), mask=pair_live)
    turned = (second * cos + first * sin).to(rounded)
    tl.store(target + KV_LORA + HALF + pair, _fit(turned, LARGEST).to(stored), mask=pair_live)


def store_rotated(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    cache: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    tokens, head_dim = qkv.shape[0], cache.shape[-1]
    assert qkv.is_contiguous()
    assert cosine.is_contiguous()
    assert sine.is_contiguous()
    query = qkv.new_empty(tokens, heads, head_dim)
    block = max(1, TILE // head_dim)
    _store_rotated[(triton.cdiv(tokens, block), kv_heads)](
        qkv,
        cosine,
        sine,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        epsilon,
        cache,
        slots,
        query,
        tokens,
        *cache.stride()[:4],
        KV_HEADS=kv_heads,
        QUERIES=heads // kv_heads,
        HALF=head_dim // 2,
        PAGE=cache.shape[3],
        NORM_QUERY=q_weight is not None,
        NORM_KEY=k_weight is not None,
        LARGEST=_largest(cache.dtype),
        BLOCK=block,
        num_warps=WARPS,
        **launch_options(qkv),
    )
    return query


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    tokens, kv_heads, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == 1
    _store[(tokens, kv_heads)](
        key,
        value,
        cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.stride()[:4],
        HEAD_DIM=head_dim,
        PAGE=cache.shape[3],
        LARGEST=_largest(cache.dtype),
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **launch_options(key),
    )


def store_latents(
    compressed: Tensor,
    cosine: Tensor,
    sine: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    cache: Tensor,
    slots: Tensor,
) -> None:
    kv_lora, half = len(norm_weight), cosine.shape[-1]
    assert compressed.shape[1] == cache.shape[4] == kv_lora + 2 * half
    assert compressed.stride(1) == cache.stride(4) == 1
    assert cosine.is_contiguous()
    assert sine.is_contiguous()
    block_stride, _, _, place_stride, _ = cache.stride()
    _store_latents[(len(compressed),)](
        compressed,
        cosine,
        sine,
        norm_weight,
        epsilon,
        cache,
        slots,
        compressed.stride(0),
        block_stride,
        place_stride,
        KV_LORA=kv_lora,
        HALF=half,
        PAGE=cache.shape[3],
        LARGEST=_largest(cache.dtype),
        BLOCK=triton.next_power_of_2(kv_lora),
        HALF_BLOCK=triton.next_power_of_2(half),
        num_warps=LATENT_WARPS,
        **launch_options(compressed),
    )


def _largest(dtype: torch.dtype) -> float:
    """Return the largest value of a narrow dtype; 0 for a dtype that can hold what models compute."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0
