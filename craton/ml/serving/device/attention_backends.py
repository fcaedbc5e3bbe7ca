"""What computes attention over pages: one small interface, and the kernels that can stand behind it.

Keys and values have been stored when `attend` is called; `begin` is called once a step, before the first layer. Ours
need nothing but torch (and Triton, on a GPU). FlashAttention 3 and FlashInfer are used where they are installed and
asked for; they read the same pages, and what they compile or plan for a step keeps them out of CUDA graphs.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from craton.ml.kernels.serving import (
    decode_attention,
    plain_decode_attention,
    plain_prefill_attention,
    prefill_attention,
)
from craton.ml.serving.settings import ServingError

WORKSPACE_BYTES = 256 << 20  # of FlashInfer, for parts of long texts that are merged later


@dataclass(slots=True)
class AttentionBatch:
    """The tokens of one step, on the device. The first `decode` requests have `queries` tokens each."""

    rows: Tensor  # int32 [requests], of the table
    lengths: Tensor  # int32 [requests], tokens so far, with those of this step
    slots: Tensor  # int64 [tokens], where each token's key and value go
    decode: int
    offsets: Tensor | None = None  # int32 [others + 1], where the tokens of the others begin, after those of `decode`
    longest_query: int = 0  # of the others
    longest: int = 0  # tokens of any request, or more
    queries: int = 1

    @property
    def decode_tokens(self) -> int:
        return self.decode * self.queries


class AttentionBackend(ABC):
    """Attention of a step's tokens over the pages of their requests."""

    can_be_captured = True

    @abstractmethod
    def begin(self, batch: AttentionBatch, table: Tensor) -> None:
        """A new step, for those who prepare it."""

    @abstractmethod
    def attend(
        self, query: Tensor, cache: Tensor, table: Tensor, batch: AttentionBatch, scale: float | None, window: int
    ) -> Tensor:
        """query [tokens, heads, head_dim], one layer's cache [blocks, 2, kv heads, page, head_dim] → as the query."""


class OwnKernels(AttentionBackend):
    """Triton on a GPU, torch elsewhere; `is_plain` takes torch everywhere, to compare with."""

    def __init__(self, is_plain: bool = False) -> None:
        self._decode = plain_decode_attention if is_plain else decode_attention
        self._prefill = plain_prefill_attention if is_plain else prefill_attention
        self.can_be_captured = not is_plain

    def begin(self, batch: AttentionBatch, table: Tensor) -> None:
        """Each call knows all it needs."""

    def attend(
        self, query: Tensor, cache: Tensor, table: Tensor, batch: AttentionBatch, scale: float | None, window: int
    ) -> Tensor:
        decode, tokens = batch.decode, batch.decode_tokens
        parts = []
        if decode:
            rows, lengths = batch.rows[:decode], batch.lengths[:decode]
            parts.append(
                self._decode(
                    query[:tokens],
                    cache,
                    table,
                    rows,
                    lengths,
                    batch.queries,
                    scale,
                    window,
                    longest=batch.longest,
                )
            )
        if tokens < len(query):
            assert batch.offsets is not None
            rows, lengths = batch.rows[decode:], batch.lengths[decode:]
            parts.append(
                self._prefill(
                    query[tokens:], cache, table, rows, lengths, batch.offsets, batch.longest_query, scale, window
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class FlashAttention3(AttentionBackend):
    """`flash_attn_interface` of the flash-attention project's Hopper build."""

    can_be_captured = False

    def __init__(self) -> None:
        self._module = _installed("flash_attn_interface", "flash3")
        self._offsets = self._table = torch.empty(0)
        self._longest_query = 1

    def begin(self, batch: AttentionBatch, table: Tensor) -> None:
        self._offsets = _all_offsets(batch)
        self._table = table[batch.rows.long()]
        self._longest_query = max(batch.queries, batch.longest_query)

    def attend(
        self, query: Tensor, cache: Tensor, table: Tensor, batch: AttentionBatch, scale: float | None, window: int
    ) -> Tensor:
        key, value = (cache[:, which].transpose(1, 2) for which in (0, 1))  # [blocks, page, kv heads, head_dim]
        out: Tensor = self._module.flash_attn_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=batch.lengths,
            page_table=self._table,
            cu_seqlens_q=self._offsets,
            max_seqlen_q=self._longest_query,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
        )
        return out


class FlashInfer(AttentionBackend):
    """`flashinfer`'s batched prefill over pages, which takes single tokens too."""

    can_be_captured = False

    def __init__(self) -> None:
        self._module = _installed("flashinfer", "flashinfer")
        self._wrapper: Any = None
        self._planned: tuple[Any, ...] | None = None

    def begin(self, batch: AttentionBatch, table: Tensor) -> None:
        self._planned = None

    def attend(
        self, query: Tensor, cache: Tensor, table: Tensor, batch: AttentionBatch, scale: float | None, window: int
    ) -> Tensor:
        page = cache.shape[3]
        wanted = (query.shape[1], cache.shape[2], query.shape[2], scale, window)
        if self._wrapper is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            self._wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        if self._planned != wanted:
            counts = (batch.lengths + page - 1) // page
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
            columns = torch.arange(table.shape[1], device=table.device)
            used = table[batch.rows.long()][columns < counts[:, None]]
            self._wrapper.plan(
                _all_offsets(batch),
                ends,
                used,
                ((batch.lengths - 1) % page + 1).int(),
                wanted[0],
                wanted[1],
                wanted[2],
                page,
                causal=True,
                sm_scale=scale,
                window_left=window - 1 if window else -1,
                q_data_type=query.dtype,
                kv_data_type=cache.dtype,
            )
            self._planned = wanted
        out: Tensor = self._wrapper.run(query, (cache[:, 0], cache[:, 1]))
        return out


def make_backend(name: str) -> AttentionBackend:
    """The backend of this name; `auto` and `triton` are ours."""
    if name in ("auto", "triton"):
        return OwnKernels()
    if name == "torch":
        return OwnKernels(is_plain=True)
    return FlashAttention3() if name == "flash3" else FlashInfer()


def _all_offsets(batch: AttentionBatch) -> Tensor:
    """Where the tokens of every request begin, int32 [requests + 1]."""
    first = torch.arange(batch.decode + 1, device=batch.rows.device, dtype=torch.int32) * batch.queries
    return first if batch.offsets is None else torch.cat([first[:-1], batch.offsets + batch.decode_tokens]).int()


def _installed(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ServingError(
            f"backend {name} needs the package that has {module!r}, which is not installed; use backend: auto"
        ) from None
