"""The Triton kernels over pages against their twins, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from test_paged import DEVICE, Requests, close, dense

from craton.ml.kernels.serving import paged

pytest.importorskip("triton", reason="Triton is not installed")

TOLERANCE = {torch.float32: 1e-5 if DEVICE == "cpu" else 1e-4, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that short requests are several, and few places: heads are cut into pieces and take turns."""
    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.NARROW", (16, 4, 3, 2))
    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.LARGE_PIECE", 2)
    monkeypatch.setattr("craton.ml.kernels.triton.paged_prefill.NARROW", (32, 16, 4, 2))


def twin_and_kernel(monkeypatch: pytest.MonkeyPatch, operation, *arguments, **options):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: False)
    plain = operation(*arguments, **options)
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: True)
    return plain, operation(*arguments, **options)


# lengths, heads, kv_heads, head_dim, page, queries, window, dtype
DECODES = [
    ([70, 1, 33], 28, 4, 16, 16, 1, 0, torch.float32),
    pytest.param([70, 1, 33, 17, 16], 4, 2, 32, 4, 3, 0, torch.float32, marks=pytest.mark.slow),
    pytest.param([40, 90, 2], 4, 2, 32, 4, 4, 21, torch.float32, marks=pytest.mark.slow),
    ([130], 2, 1, 16, 1, 2, 0, torch.float32),
    ([64, 20], 3, 3, 48, 16, 1, 0, torch.float32),
    pytest.param([70, 1, 33], 14, 2, 16, 16, 1, 30, torch.float16, marks=pytest.mark.slow),
    ([9, 31], 4, 2, 16, 8, 1, 0, torch.float16),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "page", "queries", "window", "dtype"), DECODES)
def test_decode_attention(  # type: ignore[no-untyped-def]
    monkeypatch, lengths, heads, kv_heads, head_dim, page, queries, window, dtype
) -> None:
    requests = Requests.of(lengths, kv_heads, head_dim, page, dtype)
    query = torch.randn(len(lengths) * queries, heads, head_dim, device=DEVICE).to(dtype)
    plain, ours = twin_and_kernel(
        monkeypatch,
        paged.decode_attention,
        query,
        requests.cache,
        requests.table,
        requests.rows,
        requests.lengths,
        queries,
        window=window,
        longest=max(lengths) + 5,
    )
    close(ours, plain, TOLERANCE[dtype])


def test_decode_attention_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole heads, two pieces of each, and as many as there are tiles."""
    requests = Requests.of([60, 37], 2, 16, 4)
    arguments = (torch.randn(2, 4, 16, device=DEVICE), requests.cache, requests.table, requests.rows, requests.lengths)
    results = []
    for whole_tiles, places in ((100, 1), (0, 2), (0, 100)):
        monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.NARROW", (16, 4, 3, 1))
        monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.WHOLE_TILES", whole_tiles)
        monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.processors", lambda _, count=places: count)
        plain, ours = twin_and_kernel(monkeypatch, paged.decode_attention, *arguments, longest=64)
        results.append(ours)
        close(ours, plain)
    assert not torch.equal(results[0], results[2])  # added up in another order, so it was cut otherwise


# asked, lengths, heads, kv_heads, head_dim, page, window, dtype
PREFILLS = [
    ([40, 1, 33, 7], [70, 1, 33, 80], 4, 2, 32, 4, 0, torch.float32),
    ([9, 21], [40, 21], 28, 4, 16, 16, 0, torch.float32),
    ([30, 5], [50, 64], 2, 1, 48, 1, 20, torch.float32),
    ([3, 2, 4], [33, 2, 50], 4, 2, 16, 16, 0, torch.float16),
    ([25, 40], [70, 40], 4, 4, 16, 4, 9, torch.float16),
    ([25, 9], [70, 90], 4, 2, 16, 24, 0, torch.float32),  # blocks that a tile does not end with
    ([40], [90], 4, 2, 16, 64, 30, torch.float32),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("asked", "lengths", "heads", "kv_heads", "head_dim", "page", "window", "dtype"), PREFILLS)
def test_prefill_attention(  # type: ignore[no-untyped-def]
    monkeypatch, asked, lengths, heads, kv_heads, head_dim, page, window, dtype
) -> None:
    requests = Requests.of(lengths, kv_heads, head_dim, page, dtype)
    offsets = torch.tensor([0, *accumulate(asked)], dtype=torch.int32, device=DEVICE)
    query = torch.randn(sum(asked) + 3, heads, head_dim, device=DEVICE).to(dtype)  # three of padding
    plain, ours = twin_and_kernel(
        monkeypatch,
        paged.prefill_attention,
        query,
        requests.cache,
        requests.table,
        requests.rows,
        requests.lengths,
        offsets,
        scale=0.2,
        window=window,
    )
    close(ours[: sum(asked)], plain[: sum(asked)], TOLERANCE[dtype])


@pytest.mark.usefixtures("small_tiles")
def test_attention_over_a_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins store: the interpreter rounds to fp8 otherwise than a GPU."""
    requests = Requests.of([40, 3], 2, 16, 4)
    cache = requests.cache.to(torch.float8_e4m3fn)
    where = (cache, requests.table, requests.rows, requests.lengths)
    query = torch.randn(2, 4, 16, device=DEVICE)
    plain, ours = twin_and_kernel(monkeypatch, paged.decode_attention, query, *where, longest=40)
    close(ours, plain)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    plain, ours = twin_and_kernel(monkeypatch, paged.prefill_attention, query, *where, offsets)
    close(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "normed"),
    [(28, 4, 16, 1, False), (4, 2, 64, 4, True), (3, 3, 32, 16, True)],
)
def test_store_rotated(  # type: ignore[no-untyped-def]
    monkeypatch, heads, kv_heads, head_dim, page, normed, dtype
) -> None:
    tokens = 19
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    angle = torch.rand(tokens, head_dim // 2, device=DEVICE) * 6
    weights = torch.randn(2, head_dim, device=DEVICE).to(dtype) if normed else (None, None)
    slots = torch.randperm(64, device=DEVICE)[:tokens]

    def store() -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(64 // page, 3, 2, kv_heads, page, head_dim, dtype=dtype, device=DEVICE)
        tables = (angle.cos(), angle.sin())
        return paged.store_rotated(qkv, *tables, *weights, 1e-5, whole[:, 2], slots, heads, kv_heads), whole

    for plain, ours in zip(*twin_and_kernel(monkeypatch, store), strict=True):
        close(ours, plain, TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [16, 48, 192])
def test_store(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    wide = torch.randn(7, 3, 2 * head_dim + 16, device=DEVICE)  # heads that do not lie together
    key, value = wide[..., :head_dim], wide[..., 16 + head_dim :]
    slots = torch.tensor([31, 0, 5, 17, 16, 2, 30], device=DEVICE)

    def store(dtype: torch.dtype, scale: float) -> torch.Tensor:
        whole = torch.zeros(8, 2, 2, 3, 4, head_dim, device=DEVICE).to(dtype)
        paged.store(key * scale, value * scale, whole[:, 1], slots)
        return whole.float()

    plain, ours = twin_and_kernel(monkeypatch, store, torch.float32, 1.0)
    assert torch.equal(ours, plain)
    # numbers that fp8 has, or too large for it: the interpreter rounds the others otherwise than a GPU
    key, value = (part.sign() * 2.0 ** part.abs().mul(6).round() for part in (key, value))
    plain, ours = twin_and_kernel(monkeypatch, store, torch.float8_e4m3fn, 1.0)
    assert torch.equal(ours, plain)
    assert plain.max() == 448


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("own_lengths", [[70, 1, 33], [3, 9], []])
def test_a_step_with_padding_requests_leaves_their_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, own_lengths: list[int]
) -> None:
    """Decoding requests, requests without tokens up to a bound, prefills, and room for more of them."""
    bound, asked, prompts = 5, [40, 7], [60, 20]
    decode = len(own_lengths)
    requests = Requests.of([*own_lengths, *prompts, 1], 2, 16, 4)
    dummy = requests.rows[-1:]
    decoding = torch.cat([requests.rows[:decode], dummy.expand(bound - decode)])
    decode_lengths = torch.cat([requests.lengths[:decode], torch.zeros_like(dummy).expand(bound - decode)])
    prefilling = torch.cat([requests.rows[decode : decode + 2], dummy, dummy])
    prefill_lengths = torch.cat([requests.lengths[decode : decode + 2], torch.zeros_like(dummy).expand(2)])
    bounds = [decode, *(decode + end for end in accumulate(asked))]
    offsets = torch.tensor([*bounds, bounds[-1], bounds[-1]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(bounds[-1] + 3, 4, 16, device=DEVICE)
    results = []
    for is_fused in (False, True):
        monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _, fused=is_fused: fused)
        out = torch.full_like(query, 7.0)
        pages = requests.cache, requests.table
        paged.decode_attention(query[:bound], *pages, decoding, decode_lengths, longest=200, out=out[:bound])
        if is_fused:  # in a graph prefill writes there at the same time
            assert bool((out[decode:] == 7.0).all())
        paged.prefill_attention(query, *pages, prefilling, prefill_lengths, offsets, out=out)
        assert bool((out[bounds[-1] :] == 7.0).all())
        results.append(out)
    close(results[1], results[0])
    key, value = requests.keys[decode], requests.values[decode]
    close(results[1][decode : decode + 40], dense(query[decode : decode + 40], key, value, 0))
