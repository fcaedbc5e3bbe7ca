"""Attention over latents in pages: the twins against dense attention in fp64, the Triton kernels against the twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from test_paged import DEVICE, close, dense
from test_paged_triton import TOLERANCE, twin_and_kernel
from test_shared_prefix_kernels import share
from torch import Tensor
from torch.nn.functional import rms_norm

from craton.ml.kernels import reference
from craton.ml.kernels.serving import paged, shared_prefix

pytest.importorskip("triton", reason="Triton is not installed")

EPSILON = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one request are several pieces, and more rows than one tile has."""
    from craton.ml.kernels.triton.latents import LatentTiles

    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.LARGE_PIECE", 2)
    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.SHARED_LARGE_PIECE", 1)
    for name in ("NARROW", "FLOAT8", "WIDE"):
        monkeypatch.setattr(f"craton.ml.kernels.triton.latents.{name}", LatentTiles(16, 16, 8, 2))


@dataclass
class Requests:
    """Requests whose latents lie in pages strewn over one layer of a cache, which is NaN elsewhere."""

    cache: Tensor
    table: Tensor
    rows: Tensor
    lengths: Tensor
    keys: list[Tensor]  # of each request, [length, 1, kv_lora + qk_rope]

    @staticmethod
    def of(lengths: Sequence[int], width: int, page: int, dtype: torch.dtype = torch.float32) -> Requests:
        pages = -(-max(lengths) // page)
        blocks = len(lengths) * pages + 3
        whole = torch.full((blocks, 3, 1, 1, page, width), torch.nan, dtype=dtype, device=DEVICE)
        table = torch.randperm(blocks, device=DEVICE)[: len(lengths) * pages].int().view(len(lengths), pages)
        rows = torch.randperm(len(lengths), device=DEVICE).int()
        made = Requests(whole[:, 1], table, rows, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), [])
        for row, length in zip(rows.tolist(), lengths, strict=True):
            made.keys.append(torch.randn(length, 1, width, device=DEVICE).to(dtype))
            place = torch.arange(length, device=DEVICE)
            made.cache[table[row, place // page].long(), 0, 0, place % page] = made.keys[-1][:, 0]
        return made

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.cache, self.table, self.rows, self.lengths


def offsets_of(asked: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(asked)], dtype=torch.int32, device=DEVICE)


def test_every_head_attends_to_the_latents_of_its_request() -> None:
    requests, kv_lora = Requests.of([9, 3, 33, 16], 24, 4), 16
    query = torch.randn(4 * 3, 6, 24, device=DEVICE)
    out = paged.decode_attention(query, *requests.where, 3, 0.3, longest=33, value_dim=kv_lora)
    assert out.shape == (12, 6, kv_lora)
    for index, key in enumerate(requests.keys):
        own = slice(index * 3, (index + 1) * 3)
        close(out[own], dense(query[own], key, key[..., :kv_lora], 0, 0.3))

    asked = [9, 1, 20, 5]
    query = torch.randn(sum(asked) + 2, 6, 24, device=DEVICE)
    offsets = offsets_of(asked)
    out = paged.prefill_attention(query, *requests.where, offsets, 0.3, value_dim=kv_lora)
    for index, key in enumerate(requests.keys):
        own = slice(*offsets[index : index + 2].tolist())
        close(out[own], dense(query[own], key, key[..., :kv_lora], 0, 0.3))


SLOW = pytest.mark.slow
# lengths, heads, kv_lora, qk_rope, page, queries, dtype of queries, dtype of the KV cache
DECODES = [
    pytest.param([70, 1, 33], 4, 32, 16, 16, 1, torch.float32, torch.float32, marks=SLOW),
    ([40], 20, 16, 8, 4, 1, torch.float32, torch.float32),  # two tiles of ten heads
    ([2, 37], 4, 24, 8, 1, 3, torch.float16, torch.float16),
    ([40, 3], 2, 16, 8, 16, 2, torch.float32, torch.float8_e4m3fn),
    pytest.param([130, 90], 16, 512, 64, 16, 1, torch.float16, torch.float16, marks=SLOW),  # DeepSeek-V2-Lite
]


@pytest.mark.parametrize(("lengths", "heads", "kv_lora", "qk_rope", "page", "queries", "dtype", "kv"), DECODES)
def test_decode_kernel(  # type: ignore[no-untyped-def]
    monkeypatch, lengths, heads, kv_lora, qk_rope, page, queries, dtype, kv
) -> None:
    requests = Requests.of(lengths, kv_lora + qk_rope, page, dtype)
    query = torch.randn(len(lengths) * queries, heads, kv_lora + qk_rope, device=DEVICE).to(dtype)
    cache, *where = requests.where
    options = {"longest": max(lengths) + 5, "value_dim": kv_lora}
    plain, ours = twin_and_kernel(
        monkeypatch, paged.decode_attention, query, cache.to(kv), *where, queries, 0.2, **options
    )
    close(ours, plain, TOLERANCE[dtype])


PREFILLS = [
    ([20, 1], [40, 1], 4, 32, 16, 4, torch.float32, torch.float32),
    pytest.param([40, 1, 33], [70, 1, 33], 4, 32, 16, 1, torch.float32, torch.float32, marks=SLOW),
    pytest.param([3, 9], [33, 9], 20, 24, 8, 16, torch.float16, torch.float16, marks=SLOW),  # two tiles of heads
    ([25, 2], [40, 3], 2, 16, 8, 16, torch.float32, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("asked", "lengths", "heads", "kv_lora", "qk_rope", "page", "dtype", "kv"), PREFILLS)
def test_prefill_kernel(  # type: ignore[no-untyped-def]
    monkeypatch, asked, lengths, heads, kv_lora, qk_rope, page, dtype, kv
) -> None:
    requests = Requests.of(lengths, kv_lora + qk_rope, page, dtype)
    query = torch.randn(sum(asked) + 3, heads, kv_lora + qk_rope, device=DEVICE).to(dtype)  # three of padding
    cache, *where = requests.where
    plain, ours = twin_and_kernel(
        monkeypatch,
        paged.prefill_attention,
        query,
        cache.to(kv),
        *where,
        offsets_of(asked),
        0.2,
        value_dim=kv_lora,
    )
    close(ours[: sum(asked)], plain[: sum(asked)], TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=SLOW)])
def test_kernel_with_shared_prefixes(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    requests, kv_lora = Requests.of([17, 9, 36], 24, 16), 16
    shared = share(requests, [((2, 0), 16)])  # type: ignore[arg-type]
    query = torch.randn(3, heads, 24, device=DEVICE)
    own = paged.plain_decode_attention(query, *requests.where, scale=0.3, longest=40, value_dim=kv_lora)
    plain, ours = twin_and_kernel(
        monkeypatch,
        shared_prefix.shared_decode_attention,
        query,
        *requests.where,
        shared,
        0.3,
        longest=45,
        value_dim=kv_lora,
    )
    close(plain, own)
    close(ours, own, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("kv_lora", "qk_rope", "dtype"), [(32, 8, torch.float32), (24, 12, torch.float16), (24, 8, torch.float32)]
)
def test_what_is_stored_is_the_normed_latent_and_the_rotated_key(
    monkeypatch: pytest.MonkeyPatch, kv_lora: int, qk_rope: int, dtype: torch.dtype
) -> None:
    wide = torch.randn(7, kv_lora + qk_rope + 5, device=DEVICE).to(dtype)  # rows that do not lie together
    compressed = wide[:, : kv_lora + qk_rope]
    angle = torch.rand(7, qk_rope // 2, device=DEVICE) * 6
    weight = torch.randn(kv_lora, device=DEVICE).to(dtype)
    slots = torch.tensor([31, 0, 5, 17, 16, 2, 30], device=DEVICE)

    def stored(scale: float = 1.0, kv: torch.dtype = dtype) -> Tensor:
        whole = torch.zeros(8, 2, 1, 1, 4, kv_lora + qk_rope, device=DEVICE).to(kv)
        paged.store_latents(compressed, angle.cos(), angle.sin(), scale * weight, EPSILON, whole[:, 1], slots)
        return whole.float()

    plain, ours = twin_and_kernel(monkeypatch, stored)
    close(ours, plain, TOLERANCE[dtype])
    latent = rms_norm(compressed[:, :kv_lora], (kv_lora,), weight, EPSILON)
    key = reference.rotate(compressed[:, None, kv_lora:], angle.cos(), angle.sin())[:, 0]
    flat = plain[:, 1, 0, 0].flatten(0, 1)
    close(flat[slots], torch.cat((latent, key), 1).float())
    untouched = torch.ones(32, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert not flat[untouched].any()
    assert not plain[:, 0].any()
    plain, ours = twin_and_kernel(monkeypatch, stored, 1e4, torch.float8_e4m3fn)  # most are too large for fp8
    assert plain.max() == ours.max() == 448


def test_heads_of_a_tile_divide_the_heads() -> None:
    from craton.ml.kernels.triton.latents import heads_of_tile

    assert [heads_of_tile(heads, 1, 32) for heads in (16, 128, 20, 40, 7)] == [16, 32, 20, 20, 7]
    assert [heads_of_tile(128, queries, 32) for queries in (2, 4, 5, 33)] == [16, 8, 4, 1]
