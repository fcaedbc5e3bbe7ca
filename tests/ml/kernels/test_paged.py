"""Keys and values in pages: the twins against dense attention in fp64, the Triton kernels against the twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from craton.ml.kernels import reference
from craton.ml.kernels.serving import paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass
class Requests:
    """Requests whose keys and values lie in pages strewn over one layer of a cache, which is NaN elsewhere."""

    cache: Tensor
    table: Tensor
    rows: Tensor
    lengths: Tensor
    keys: list[Tensor]  # of each request, [length, kv_heads, head_dim]
    values: list[Tensor]

    @staticmethod
    def of(
        lengths: Sequence[int], kv_heads: int, head_dim: int, page: int, dtype: torch.dtype = torch.float32
    ) -> Requests:
        pages = -(-max(lengths) // page)
        blocks = len(lengths) * pages + 3
        whole = torch.full((blocks, 3, 2, kv_heads, page, head_dim), torch.nan, dtype=dtype, device=DEVICE)
        table = torch.randperm(blocks, device=DEVICE)[: len(lengths) * pages].int().view(len(lengths), pages)
        rows = torch.randperm(len(lengths), device=DEVICE).int()
        made = Requests(whole[:, 1], table, rows, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), [], [])
        for row, length in zip(rows.tolist(), lengths, strict=True):
            key, value = torch.randn(2, length, kv_heads, head_dim, dtype=torch.float32, device=DEVICE).to(dtype)
            place = torch.arange(length, device=DEVICE)
            paged.store(key, value, made.cache, table[row, place // page].long() * page + place % page)
            made.keys.append(key)
            made.values.append(value)
        return made


def dense(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None = None) -> Tensor:
    """Attention of a request's last tokens, [queries, heads, head_dim], written out in fp64."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * (scale or query.shape[-1] ** -0.5)
    place = torch.arange(len(key), device=query.device)
    own = place[len(key) - len(query) :, None]
    sees = place <= own
    if window:
        sees &= place > own - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("page", "queries"), [(1, 1), (4, 3), (16, 2)])
def test_decode_is_dense_attention_of_the_last_tokens(page: int, queries: int, window: int) -> None:
    requests = Requests.of([9, 3, 33, 16], 2, 16, page)
    query = torch.randn(4 * queries, 6, 16, device=DEVICE)
    out = paged.decode_attention(
        query, requests.cache, requests.table, requests.rows, requests.lengths, queries, window=window, longest=33
    )
    for index, (key, value) in enumerate(zip(requests.keys, requests.values, strict=True)):
        own = slice(index * queries, (index + 1) * queries)
        close(out[own], dense(query[own], key, value, window))


@pytest.mark.parametrize("window", [0, 7])
def test_prefill_is_dense_attention_of_the_last_tokens(window: int) -> None:
    requests, asked = Requests.of([9, 3, 33, 16], 2, 16, 4), [9, 1, 20, 5]
    bounds = [0, *accumulate(asked)]
    query = torch.randn(bounds[-1] + 2, 6, 16, device=DEVICE)
    out = paged.prefill_attention(
        query,
        requests.cache,
        requests.table,
        requests.rows,
        requests.lengths,
        torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        scale=0.3,
        window=window,
    )
    for index, (key, value) in enumerate(zip(requests.keys, requests.values, strict=True)):
        own = slice(bounds[index], bounds[index + 1])
        close(out[own], dense(query[own], key, value, window, 0.3))


def test_a_query_before_the_first_token_gives_zeros() -> None:
    """A padded request has one token, however many queries there are."""
    requests = Requests.of([1, 8], 2, 16, 4)
    out = paged.decode_attention(
        torch.randn(6, 4, 16, device=DEVICE), *pages_of(requests), requests.lengths, 3, longest=8
    )
    assert not out[:2].any()
    close(out[2], requests.values[0][0].repeat_interleave(2, 0))
    assert out[3:].isfinite().all()


def test_store_rotated_norms_and_turns_as_the_model_does() -> None:
    heads, kv_heads, head_dim, tokens = 6, 2, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE)
    angle = torch.rand(tokens, head_dim // 2, device=DEVICE) * 6
    q_weight, k_weight = torch.randn(2, head_dim, device=DEVICE)
    cache = torch.zeros(4, 2, kv_heads, 4, head_dim, device=DEVICE)
    slots = torch.tensor([9, 2, 15, 0, 7], device=DEVICE)
    out = paged.store_rotated(qkv, angle.cos(), angle.sin(), q_weight, k_weight, 1e-6, cache, slots, heads, kv_heads)
    query, key, value = reference.split_heads(qkv, heads, kv_heads, head_dim)
    query, key = rms_norm(query, (head_dim,), q_weight, 1e-6), rms_norm(key, (head_dim,), k_weight, 1e-6)
    close(out, reference.rotate(query, angle.cos(), angle.sin()))
    flat = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [slots, 2, kv_heads, head_dim]
    close(flat[slots, 0], reference.rotate(key, angle.cos(), angle.sin()))
    close(flat[slots, 1], value)
    untouched = torch.ones(16, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert not flat[untouched].any()


def test_a_cache_in_fp8_holds_what_fits_and_cuts_the_rest() -> None:
    cache = torch.zeros(2, 2, 1, 4, 16, device=DEVICE).to(torch.float8_e4m3fn)
    key = torch.linspace(-1000, 1000, 16, device=DEVICE).view(1, 1, 16)
    paged.store(key, key / 100, cache, torch.tensor([5], device=DEVICE))
    close(cache[1, 0, 0, 1].float(), key[0, 0].clamp(-448, 448), 0.07)
    close(cache[1, 1, 0, 1].float(), key[0, 0] / 100, 0.07)
    out = paged.decode_attention(
        torch.randn(1, 2, 16, device=DEVICE),
        cache,
        torch.ones(1, 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.ones(1, dtype=torch.int32, device=DEVICE),
        longest=4,
    )
    assert out.shape == (1, 2, 16)


def pages_of(requests: Requests) -> tuple[Tensor, Tensor, Tensor]:
    return requests.cache, requests.table, requests.rows
