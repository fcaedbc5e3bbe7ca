"""Operations of serving, without gradients: paged KV cache, matmuls of a few rows, sampling.

On CUDA they are Triton kernels, elsewhere plain PyTorch. The kernels can be captured in CUDA graphs: none waits for the
device, and launches depend only on shapes and on upper bounds that the caller knows.

One layer's KV cache is [blocks, parts, kv_heads, page, head_dim] in the model's dtype or in float8_e4m3fn. It has two
parts, keys before values; that of latent attention has keys only, whose first `value_dim` numbers are the values. Any
strides but a head's own are allowed, so that all layers of a block may be contiguous. A request's tokens are in the
blocks of its row of `table`, [table rows, pages]; `rows` [requests] is the index of that row and `lengths` [requests]
the number of tokens, including those of this step. Nothing beyond a request's length is read. These three must be
written before this step's keys are stored, because attention may read them while the store runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from craton.ml.kernels import elementwise, reference
from craton.ml.kernels.sampling_hash import MIN_TEMPERATURE, MULTIPLIERS, ROW_KEYS

FEW_ROWS = 8  # above this a matmul is no longer bound by reading its weight, and the library is used


class Past(ABC):
    """The KV cache as seen by a serving model: a layer passes the keys and values of its tokens and gets attention over
    the cache back. The model does not know how the cache is stored and which kernel runs. Tokens of all requests are
    concatenated."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        heads: int,
        kv_heads: int,
        norms: reference.Norms | None,
        window: int,
    ) -> Tensor:
        """The fused projection [tokens, …] → attention of its queries over the KV cache and itself, [tokens, heads,
        d]."""

    @abstractmethod
    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        compressed: Tensor,
        rope: tuple[Tensor, Tensor],
        norm_weight: Tensor,
        epsilon: float,
        scale: float,
    ) -> Tensor:
        """The same for latent attention: cache the normed latents and rotated keys of `compressed` [tokens, kv_lora +
        qk_rope], and let queries of that width, [tokens, heads, …], attend to them → latents [tokens, heads, kv_lora].
        The norm's weight is [kv_lora]."""


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
    """Split the fused projection [tokens, rows grouped by key/value head], store keys and values in the KV cache,
    return the query [tokens, heads, head_dim].

    Queries and keys are rotated by the tables [tokens, turning dimensions / 2], and normed before that if they have a
    weight [head_dim]. `slots` [tokens] is block · page + offset of each token.
    """
    head_dim = cache.shape[-1]
    if elementwise.is_fused(qkv) and 2 * cosine.shape[-1] == head_dim and head_dim & (head_dim - 1) == 0:
        from craton.ml.kernels.triton import paged_store

        return paged_store.store_rotated(qkv, cosine, sine, q_weight, k_weight, epsilon, cache, slots, heads, kv_heads)
    query, key, value = reference.split_heads(qkv, heads, kv_heads, head_dim)
    if q_weight is not None:
        query = rms_norm(query, (head_dim,), q_weight, epsilon)
    if k_weight is not None:
        key = rms_norm(key, (head_dim,), k_weight, epsilon)
    store(reference.rotate(key, cosine, sine), value, cache, slots)
    return reference.rotate(query, cosine, sine)


def store_latents(
    compressed: Tensor,
    cosine: Tensor,
    sine: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    cache: Tensor,
    slots: Tensor,
) -> None:
    """Store what latent attention caches: of `compressed` [tokens, kv_lora + qk_rope] the latents, normed with the
    weight [kv_lora], and the key that all heads share, rotated by the tables [tokens, qk_rope / 2]."""
    if elementwise.is_fused(compressed):
        from craton.ml.kernels.triton import paged_store

        paged_store.store_latents(compressed, cosine, sine, norm_weight, epsilon, cache, slots)
        return
    latent, key = compressed.split((len(norm_weight), 2 * cosine.shape[-1]), dim=-1)
    latent = rms_norm(latent, tuple(norm_weight.shape), norm_weight, epsilon)
    key = reference.rotate(key.unsqueeze(1), cosine, sine).squeeze(1)
    _write(torch.cat((latent, key), dim=-1)[:, None, None], cache, slots)


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store keys and values [tokens, kv_heads, head_dim] at `slots` [tokens]: block · page + offset."""
    if elementwise.is_fused(key):
        from craton.ml.kernels.triton import paged_store

        paged_store.store(key, value, cache, slots)
        return
    _write(torch.stack((key, value), dim=1), cache, slots)


def _write(parts: Tensor, cache: Tensor, slots: Tensor) -> None:
    """parts [tokens, parts, kv_heads, head_dim]."""
    page = cache.shape[3]
    if cache.dtype == torch.float8_e4m3fn:
        largest = torch.finfo(cache.dtype).max
        # torch cannot index-assign fp8, but it can index-assign bytes
        cache, parts = cache.view(torch.uint8), parts.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
    cache[slots // page, :, :, slots % page] = parts.to(cache.dtype)


def decode_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    queries: int = 1,
    scale: float | None = None,
    window: int = 0,
    *,
    longest: int,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Decode: the last `queries` tokens of each request attend to all tokens up to themselves, or to the last `window`:
    query [requests · queries, heads, head_dim] → the same, with `value_dim` [requests · queries, heads, value_dim].

    `longest` is an upper bound of the lengths. A query before its request's first token (a padded request has one
    token, whatever `queries` is) gives zeros; the queries of a request without tokens have undefined results, which a
    kernel does not write. With `out`, contiguous, results are written there.
    """
    if elementwise.is_fused(query):
        from craton.ml.kernels.triton import paged_decode

        return paged_decode.attention(
            query, cache, table, rows, lengths, queries, scale, window, longest, value_dim, out=out
        )
    return plain_decode_attention(
        query, cache, table, rows, lengths, queries, scale, window, longest=longest, value_dim=value_dim, out=out
    )


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    scale: float | None = None,
    window: int = 0,
    *,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Prefill: the last tokens of each request attend to all tokens up to themselves, or to the last `window`: query
    [tokens, heads, head_dim] → the same, with `value_dim` [tokens, heads, value_dim].

    Request b's tokens are query[offsets[b] : offsets[b + 1]]. Tokens before the first offset
    and after the last one have undefined results. With `out`, contiguous, results are written there, and nothing to
    those tokens.
    """
    if elementwise.is_fused(query):
        from craton.ml.kernels.triton import paged_prefill

        return paged_prefill.attention(query, cache, table, rows, lengths, offsets, scale, window, value_dim, out)
    return plain_prefill_attention(
        query, cache, table, rows, lengths, offsets, scale, window, value_dim=value_dim, out=out
    )


def plain_decode_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    queries: int = 1,
    scale: float | None = None,
    window: int = 0,
    *,
    longest: int,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`decode_attention` in plain PyTorch."""
    del longest  # only kernels need it
    if not lengths.any():
        return query.new_zeros(*query.shape[:2], value_dim or query.shape[2]) if out is None else out.zero_()
    key, value = gather_blocks(cache, table[rows.long()], lengths, query.dtype, value_dim)
    places = lengths[:, None] - queries + torch.arange(queries, device=query.device)
    mixed = _attend(query.unflatten(0, (-1, queries)), key, value, places, scale, window).flatten(0, 1)
    return mixed if out is None else out.copy_(mixed)


def plain_prefill_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    scale: float | None = None,
    window: int = 0,
    *,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`prefill_attention` in plain PyTorch."""
    mixed = out if out is not None else query.new_zeros(*query.shape[:2], value_dim or query.shape[2])
    bounds = offsets.tolist()
    for request, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        one = slice(request, request + 1)
        key, value = gather_blocks(cache, table[rows[one].long()], lengths[one], query.dtype, value_dim)
        places = lengths[one, None] - (end - begin) + torch.arange(end - begin, device=query.device)
        mixed[begin:end] = _attend(query[None, begin:end], key, value, places, scale, window)[0]
    return mixed


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [rows, in] · weight [out, in]ᵀ + bias. A weight in float8_e4m3fn has a scale [out] in fp32.

    For up to FEW_ROWS rows, bound by reading the weight; correct but slow for more.
    """
    if elementwise.is_fused(x) and x.shape[0] <= FEW_ROWS:
        from craton.ml.kernels.triton import skinny

        return skinny.linear(x, weight, bias, scale)
    return linear(x, _dequantize(weight, scale, x.dtype), bias)


def skinny_gated(
    x: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None = None, up_scale: Tensor | None = None
) -> Tensor:
    """silu(x · gateᵀ) · (x · upᵀ) for x [rows, in] and weights [features, in], with scales if they are fp8."""
    if elementwise.is_fused(x) and x.shape[0] <= FEW_ROWS:
        from craton.ml.kernels.triton import skinny

        return skinny.gated(x, gate, up, gate_scale, up_scale)
    return reference.swiglu(
        linear(x, _dequantize(gate, gate_scale, x.dtype)), linear(x, _dequantize(up, up_scale, x.dtype))
    )


def choose(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, logprob_temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample: (token [rows] int64, its log-probability [rows] fp32) for logits [rows, vocabulary].

    At temperature 0 the first of the largest logits; above, a sample of softmax(logits / temperature), always the same
    for the same seed and position. The log-probability is that of softmax(logits / logprob_temperature); a
    logprob_temperature of 0 leaves the logits as they are. A row with a NaN, or whose largest logit is not finite,
    gives token -1 and log-probability NaN.
    """
    if elementwise.is_fused(logits):
        from craton.ml.kernels.triton import choose as triton_choose

        return triton_choose.choose(logits, temperature, seeds, positions, logprob_temperature)
    logits = logits.float()
    hot = (temperature >= MIN_TEMPERATURE)[:, None]
    coolness = 1.0 / torch.where(hot, temperature[:, None], 1.0)
    noise = torch.where(hot, gumbel(seeds, positions, logits.shape[1]), 0.0)
    token = (logits * coolness + noise).argmax(-1)
    is_sampled = logprob_temperature >= MIN_TEMPERATURE
    scale = 1.0 / torch.where(is_sampled, logprob_temperature, 1.0)
    logprob = (logits * scale[:, None]).log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
    sound = logits.amax(-1).isfinite() & ~logits.isnan().any(-1)
    return torch.where(sound, token, -1), torch.where(sound, logprob, torch.nan)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The noise that `choose` adds, [rows, vocabulary] in fp32: Gumbel, a function of seed, position and token. The
    kernels make their own."""
    tokens = torch.arange(vocabulary, device=seeds.device)
    first, second = _row_keys(seeds, positions).unsqueeze(-1)
    bits = _mix(_mix(tokens + first) ^ second)
    # A large Gumbel variate comes from a small exponential one, which keeps its digits if made from a small uniform
    # one.
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


WORD = 0xFFFFFFFF


def _row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return both keys of every row: [2, rows]."""
    keys = torch.tensor(ROW_KEYS, device=seeds.device)[:, None]
    for number in (seeds, positions):
        keys = _mix(_mix(keys ^ (number & WORD)) ^ (number >> 32 & WORD))
    return keys


def _mix(number: Tensor) -> Tensor:
    """Permute the 32-bit numbers, in int64, whose multiplication wraps around without changing the low half."""
    number = number & WORD
    number = ((number ^ number >> 16) * MULTIPLIERS[0]) & WORD
    number = ((number ^ number >> 15) * MULTIPLIERS[1]) & WORD
    return number ^ number >> 16


def gather_blocks(
    cache: Tensor, table: Tensor, lengths: Tensor, dtype: torch.dtype, value_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Return keys and values [requests, kv_heads, longest, head_dim] of the requests with the blocks table [requests,
    pages], zero beyond a request's length."""
    page, longest = cache.shape[3], int(lengths.max())
    pages = torch.arange(-(-longest // page), device=cache.device)
    blocks = torch.where(pages * page < lengths[:, None], table[:, : len(pages)], 0)
    gathered = cache[blocks.long()].to(dtype)  # [requests, pages, parts, kv_heads, page, head_dim]
    gathered = gathered.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :longest]
    beyond = torch.arange(longest, device=cache.device) >= lengths[:, None]
    return keys_and_values(gathered.masked_fill_(beyond[:, None, :, None], 0.0), value_dim)  # a copy already


def keys_and_values(parts: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """parts [parts, …, head_dim] of a KV cache → keys and values."""
    return parts[0], parts[0, ..., :value_dim] if value_dim else parts[1]


def _attend(query: Tensor, key: Tensor, value: Tensor, places: Tensor, scale: float | None, window: int) -> Tensor:
    """query [requests, queries, heads, head_dim] at these positions of their requests → values of the same, computed in
    fp32."""
    keys = torch.arange(key.shape[2], device=query.device)
    sees = keys <= places[..., None]
    if window:
        sees &= keys > places[..., None] - window
    mixed = scaled_dot_product_attention(
        query.transpose(1, 2).float(), key.float(), value.float(), sees[:, None], scale=scale, enable_gqa=True
    )
    mixed = mixed.masked_fill(~sees.any(-1)[:, None, :, None], 0.0)
    return mixed.transpose(1, 2).to(query.dtype)


def _dequantize(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight if scale is None else (weight.float() * scale[:, None]).to(dtype)
