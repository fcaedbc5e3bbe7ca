"""Attention by others than our own kernels. FlashAttention 3 and FlashInfer run on GPUs only and cannot be had here:
what stands in for them takes the arguments that their documentation names and computes in plain PyTorch what it
promises."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_pairs import LONGEST, Answer, expect_greedy, pair
from torch import Tensor

from craton.ml.kernels.serving import plain_prefill_attention
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.messages import OutputDelta, Sampling, Submit
from craton.ml.serving.settings import EngineSettings, ServingError


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,  # [pages, page, kv heads, head_dim]
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    assert causal
    assert {each.dtype for each in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    cache = torch.stack([k_cache.transpose(1, 2), v_cache.transpose(1, 2)], 1)
    window = window_size[0] + 1 if window_size[0] >= 0 else 0
    rows = torch.arange(len(cache_seqlens), dtype=torch.int32)
    return plain_prefill_attention(
        q, cache, page_table, rows, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, window
    )


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        counts = paged_kv_indptr.diff()
        self.lengths = ((counts - 1) * page_size + paged_kv_last_page_len).int()
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for request, (begin, end) in enumerate(pairwise(paged_kv_indptr.tolist())):
            self.table[request, : end - begin] = paged_kv_indices[begin:end]
        self.offsets, self.scale, self.window = qo_indptr, sm_scale, window_left + 1
        self.shape = (num_qo_heads, head_dim_qk)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert tuple(q.shape[1:]) == self.shape
        cache = torch.stack(paged_kv_cache, 1)
        rows = torch.arange(len(self.lengths), dtype=torch.int32)
        longest = int(self.offsets.diff().max())
        return plain_prefill_attention(
            q, cache, self.table, rows, self.lengths, self.offsets, longest, self.scale, self.window
        )


STAND_INS: dict[str, tuple[str, Any]] = {
    "flash3": ("flash_attn_interface", SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)),
    "flashinfer": (
        "flashinfer",
        SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper),
    ),
}


@pytest.mark.parametrize("backend", ["torch", "flash3", "flashinfer"])
def test_answers_do_not_depend_on_the_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend in STAND_INS:
        monkeypatch.setitem(sys.modules, *STAND_INS[backend])
    options = EngineSettings(
        max_length=LONGEST,
        blocks=200,
        max_running=4,
        page=4,
        chunk_tokens=16,
        backend=backend,  # type: ignore[arg-type]
    )
    engine = build_engine(pair("qwen3")[1], options)
    prompts = {number: [number + place for place in range(3 + 7 * number)] for number in range(5)}
    for number, prompt in prompts.items():
        engine.submit(Submit(number, tuple(prompt), Sampling(max_tokens=12, temperature=0.0)))
    pieces: dict[int, list[OutputDelta]] = {}
    while not engine.is_idle:
        for piece in engine.step():
            pieces.setdefault(piece.id, []).append(piece)
    for number, prompt in prompts.items():
        expect_greedy(pair("qwen3")[0], prompt, Answer.of(pieces[number]))


@pytest.mark.parametrize("backend", sorted(STAND_INS))
def test_a_backend_that_is_not_installed_is_named(backend: str) -> None:
    with pytest.raises(ServingError, match=f"backend {backend} needs the package"):
        build_engine(pair("llama")[1], EngineSettings(max_length=64, blocks=50, backend=backend))  # type: ignore[arg-type]
