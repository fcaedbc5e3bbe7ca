"""Decode attention that reads a common beginning of several requests once (cascade attention).

The queries of a group's requests attend together to the blocks that all of them begin with, then each to the rest of
its own. Both results are partial: a weighted sum of values, with the maximum and the sum of its softmax. Merging them
by log-sum-exp gives the attention over all tokens, in exact arithmetic the same as `decode_attention`:

    m = max(m₁, m₂)    out = (a₁ · exp(m₁ - m) + a₂ · exp(m₂ - m)) / (s₁ · exp(m₁ - m) + s₂ · exp(m₂ - m))
"""

from __future__ import annotations

import torch
from torch import Tensor

from craton.ml.kernels import elementwise
from craton.ml.kernels.serving.paged import gather_blocks, keys_and_values
from craton.ml.kernels.shared_prefixes import SharedPrefixes


def shared_decode_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    shared: SharedPrefixes,
    scale: float | None = None,
    *,
    longest: int,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`decode_attention` of one query per request, without a window, that reads shared blocks once per group."""
    if elementwise.is_fused(query):
        from craton.ml.kernels.triton import paged_decode

        return paged_decode.attention(query, cache, table, rows, lengths, 1, scale, 0, longest, value_dim, shared, out)
    return plain_shared_decode_attention(
        query, cache, table, rows, lengths, shared, scale, longest=longest, value_dim=value_dim, out=out
    )


def plain_shared_decode_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    shared: SharedPrefixes,
    scale: float | None = None,
    *,
    longest: int,
    value_dim: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`shared_decode_attention` in plain PyTorch."""
    del longest  # only kernels need it
    page, kv_heads = cache.shape[3], cache.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scaled = query.unflatten(1, (kv_heads, -1)).float() * scale  # [requests, kv_heads, heads of each, head_dim]
    pages = torch.arange(table.shape[1], device=query.device) + shared.skipped[:, None] // page
    own_blocks = table[rows.long()].gather(1, pages.clamp(max=table.shape[1] - 1))
    left = lengths - shared.skipped
    key, value = gather_blocks(cache, own_blocks, left, query.dtype, value_dim)
    sees = torch.arange(key.shape[2], device=query.device) < left[:, None]
    mixed, largest, summed = _partial(scaled, key, value, sees[:, None, None])
    begin = 0
    for end, row, tokens in torch.stack((shared.ends, shared.rows, shared.tokens), 1).tolist():
        if not tokens:
            break
        members = shared.members[begin:end].long()
        begin = end
        # Whole blocks: nothing of them is beyond the prefix. [pages, parts, kv_heads, page, head_dim].
        blocks = cache[table[row, : tokens // page].long()].to(query.dtype)
        key, value = keys_and_values(blocks.permute(1, 2, 0, 3, 4).flatten(2, 3), value_dim)
        asked = scaled[members].transpose(0, 1).flatten(1, 2)  # [kv_heads, members · heads of each, head_dim]
        theirs = (part.unflatten(1, (len(members), -1)).transpose(0, 1) for part in _partial(asked, key, value, None))
        prefix_mixed, prefix_largest, prefix_summed = theirs
        top = torch.maximum(prefix_largest, largest[members])
        prefix_weight, own_weight = (prefix_largest - top).exp(), (largest[members] - top).exp()
        mixed[members] = prefix_mixed * prefix_weight + mixed[members] * own_weight
        summed[members] = prefix_summed * prefix_weight + summed[members] * own_weight
    result = (mixed / summed).flatten(1, 2).to(query.dtype)
    return result if out is None else out.copy_(result)


def _partial(query: Tensor, key: Tensor, value: Tensor, sees: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """query [..., queries, d], key and value [..., keys, d] → Σ weight · value, the largest score and Σ weight, with
    weight = exp(score - largest)."""
    scores = query @ key.float().transpose(-1, -2)
    if sees is not None:
        scores = scores.masked_fill(~sees, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    return weights @ value.float(), largest, weights.sum(-1, keepdim=True)
