"""Attention that reads a shared prefix once per group equals attention that reads it for every request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_paged import DEVICE, Requests, close

from craton.ml.kernels.serving import SharedPrefixes, paged, shared_prefix
from craton.ml.serving.device.shared_prefix import group_numbers, shared_prefixes
from craton.ml.serving.schedule import PrefixGroups

TOLERANCE = {torch.float32: 1e-5 if DEVICE == "cpu" else 1e-4, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def share(requests: Requests, groups: Sequence[tuple[Sequence[int], int]]) -> SharedPrefixes:
    """Let the requests of each group (members, tokens) begin with the blocks of the first of them."""
    page = requests.cache.shape[3]
    rows = requests.rows.tolist()
    for members, tokens in groups:
        for member in members[1:]:
            requests.table[rows[member], : tokens // page] = requests.table[rows[members[0]], : tokens // page]
    numbers = group_numbers(
        PrefixGroups(
            np.asarray([member for members, _ in groups for member in members], np.int32),
            np.cumsum([len(members) for members, _ in groups], dtype=np.int32),
            np.asarray([rows[members[0]] for members, _ in groups], np.int32),
            np.asarray([tokens for _, tokens in groups], np.int32),
        ),
        len(rows),
    )
    return shared_prefixes(torch.from_numpy(numbers).to(DEVICE), len(rows))


TWO_GROUPS = [((4, 1, 6), 32), ((0, 5), 16)]
LENGTHS = [40, 33, 9, 70, 90, 17, 61]  # of seven requests, two of which are in no group


@pytest.mark.parametrize("page", [1, 16])
def test_plain_attention_with_groups_equals_attention_without(page: int) -> None:
    requests = Requests.of(LENGTHS, 2, 16, page)
    shared = share(requests, TWO_GROUPS)
    query = torch.randn(len(LENGTHS), 6, 16, device=DEVICE)
    where = (requests.cache, requests.table, requests.rows, requests.lengths)
    own = paged.plain_decode_attention(query, *where, scale=0.3, longest=90)
    close(shared_prefix.plain_shared_decode_attention(query, *where, shared, 0.3, longest=90), own)


def test_attention_reads_a_group_s_blocks_from_one_row_only() -> None:
    """The other members' own entries of the block table, within the shared tokens, may be anything."""
    requests = Requests.of(LENGTHS, 2, 16, 4)
    shared = share(requests, TWO_GROUPS)
    query = torch.randn(len(LENGTHS), 4, 16, device=DEVICE)
    where = (requests.cache, requests.table, requests.rows, requests.lengths)
    own = paged.plain_decode_attention(query, *where, longest=90)
    requests.table[requests.rows[1].item(), : 32 // 4] = 0
    close(shared_prefix.plain_shared_decode_attention(query, *where, shared, longest=90), own)


SLOW = pytest.mark.slow
# lengths, groups, heads, kv_heads, head_dim, page, dtype of queries, dtype of the KV cache
KERNELS = [
    ([33, 9, 20, 40], [((3, 0), 32)], 2, 2, 16, 16, torch.float32, torch.float32),
    ([33, 40], [((1, 0), 32)], 2, 1, 16, 16, torch.float32, torch.float8_e4m3fn),
    pytest.param(LENGTHS, TWO_GROUPS, 6, 2, 16, 16, torch.float32, torch.float32, marks=SLOW),
    # two tiles of queries
    pytest.param([70, 66, 64, 90], [((0, 1, 2, 3), 60)], 28, 4, 16, 4, torch.float32, torch.float32, marks=SLOW),
    pytest.param(LENGTHS, TWO_GROUPS, 2, 2, 48, 1, torch.float16, torch.float16, marks=SLOW),
    pytest.param([9, 33, 40], [], 4, 2, 16, 16, torch.float32, torch.float32, marks=SLOW),
]


@pytest.mark.parametrize(("lengths", "groups", "heads", "kv_heads", "head_dim", "page", "dtype", "kv"), KERNELS)
def test_kernels_with_groups_equal_attention_without(  # type: ignore[no-untyped-def]
    monkeypatch, lengths, groups, heads, kv_heads, head_dim, page, dtype, kv
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # tiles so small that prefixes are split, and several tiles of queries
    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.NARROW", (16, 4, 3, 2))
    monkeypatch.setattr("craton.ml.kernels.triton.paged_decode.SHARED_LARGE_PIECE", 1)
    monkeypatch.setattr("craton.ml.kernels.triton.paged_shared.NARROW", 16)
    monkeypatch.setattr("craton.ml.kernels.triton.paged_shared.MAX_ROWS", 16)
    requests = Requests.of(lengths, kv_heads, head_dim, page, dtype)
    shared = share(requests, groups)
    query = torch.randn(len(lengths), heads, head_dim, device=DEVICE).to(dtype)
    where = (requests.cache.to(kv), requests.table, requests.rows, requests.lengths)
    own = paged.plain_decode_attention(query, *where, longest=max(lengths))
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: True)
    ours = shared_prefix.shared_decode_attention(query, *where, shared, longest=max(lengths) + 5)
    close(ours, own, TOLERANCE[dtype])


@pytest.mark.slow
def test_kernels_do_not_depend_on_how_the_prefix_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    requests = Requests.of([97, 100, 90], 1, 16, 16)
    shared = share(requests, [((0, 1, 2), 80)])
    query = torch.randn(3, 2, 16, device=DEVICE)
    where = (requests.cache, requests.table, requests.rows, requests.lengths)
    own = paged.plain_decode_attention(query, *where, longest=100)
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: True)
    results = []
    for block, places in ((16, 1), (16, 3), (16, 50), (32, 2)):
        monkeypatch.setattr("craton.ml.kernels.triton.paged_shared.NARROW", block)
        monkeypatch.setattr("craton.ml.kernels.triton.paged_shared.processors", lambda _, count=places: count)
        results.append(shared_prefix.shared_decode_attention(query, *where, shared, longest=128))
        close(results[-1], own, TOLERANCE[torch.float32])
    assert not torch.equal(results[0], results[2])  # added up in another order, so it was split otherwise
