"""Paged attention: the KV cache in blocks, the batch whose tokens attend to it, and the backends (Triton kernels on a
GPU, torch elsewhere).

`attend` needs the step's own keys and values in the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from craton.ml.kernels.serving import (
    Norms,
    Past,
    SharedPrefixes,
    decode_attention,
    plain_decode_attention,
    plain_prefill_attention,
    plain_shared_decode_attention,
    prefill_attention,
    shared_decode_attention,
    store_latents,
    store_rotated,
)
from craton.ml.serving.settings import AttentionBackendName


@dataclass(slots=True)
class AttentionBatch:
    """The tokens of one step, on the device. The first `decode` requests have `queries` tokens each, the others are
    prefills. Of these first ones some may have length 0: padding without tokens. The tokens after the last offset are
    padding, too."""

    rows: Tensor  # int32 [requests], rows of the block table
    lengths: Tensor  # int32 [requests], tokens so far, including this step's
    slots: Tensor  # int64 [tokens], where each token's key and value are stored
    decode: int
    offsets: Tensor | None = None  # int32 [prefills + 1], where each prefill's tokens begin, and where the last ends
    longest: int = 0  # upper bound on the tokens of any request
    queries: int = 1
    shared: SharedPrefixes | None = None  # of the first `decode` requests, with one query each

    @property
    def decode_tokens(self) -> int:
        return self.decode * self.queries


class AttentionBackend:
    """Attention of a step's tokens over the KV cache blocks of their requests. `is_plain`: torch also on a GPU."""

    def __init__(self, is_plain: bool = False) -> None:
        self._decode = plain_decode_attention if is_plain else decode_attention
        self._shared_decode = plain_shared_decode_attention if is_plain else shared_decode_attention
        self._prefill = plain_prefill_attention if is_plain else prefill_attention
        self.can_be_captured = not is_plain

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        table: Tensor,
        batch: AttentionBatch,
        scale: float | None = None,
        window: int = 0,
        value_dim: int = 0,
    ) -> Tensor:
        """query [tokens, heads, head_dim], one layer's cache [blocks, parts, kv heads, page, head_dim] → as the query;
        with keys only, whose first `value_dim` numbers are the values, [tokens, heads, value_dim]."""
        decode, tokens = batch.decode, batch.decode_tokens
        out = query.new_empty(*query.shape[:2], value_dim or query.shape[2])
        sizes: dict[str, Any]
        has_prompts = len(batch.rows) > decode
        # In a graph they run side by side: one is bound by memory, the other by latency and arithmetic.
        side = _branch(query) if decode and has_prompts else None
        with torch.cuda.stream(side):
            if decode:
                rows, lengths = batch.rows[:decode], batch.lengths[:decode]
                own, sizes = query[:tokens], {"longest": batch.longest, "value_dim": value_dim, "out": out[:tokens]}
                if batch.shared is None or window:  # a window sees little of a prefix
                    self._decode(own, cache, table, rows, lengths, batch.queries, scale, window, **sizes)
                else:
                    self._shared_decode(own, cache, table, rows, lengths, batch.shared, scale, **sizes)
        if has_prompts:
            assert batch.offsets is not None
            rows, lengths = batch.rows[decode:], batch.lengths[decode:]
            sizes = {"value_dim": value_dim, "out": out}
            self._prefill(query, cache, table, rows, lengths, batch.offsets, scale, window, **sizes)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return out


def _branch(query: Tensor) -> torch.cuda.Stream | None:
    """Return another stream of the graph that is being captured, which begins after what is on this one."""
    if not query.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    side = _side_stream(query.device)
    side.wait_stream(torch.cuda.current_stream())
    return side


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class PagedPast(Past):
    """The paged KV cache. `cache` is [blocks, layers, parts, kv heads, page, head_dim]: all layers of a block are
    contiguous, so one copy moves a block between tiers."""

    def __init__(self, cache: Tensor, table: Tensor, backend: AttentionBackend) -> None:
        self.cache = cache
        self.table = table  # block table: int32 [rows, blocks of a request]
        self.backend = backend
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Set the batch of the next forward pass."""
        self._batch = batch

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        heads: int,
        kv_heads: int,
        norms: Norms | None,
        window: int,
    ) -> Tensor:
        assert self._batch is not None
        cosine, sine = (table.flatten(0, 1) for table in rope)
        query_weight, key_weight, epsilon = norms or (None, None, 0.0)
        cache = self.cache[:, layer]
        query = store_rotated(
            qkv, cosine, sine, query_weight, key_weight, epsilon, cache, self._batch.slots, heads, kv_heads
        )
        return self.backend.attend(query, cache, self.table, self._batch, window=window)

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
        assert self._batch is not None
        cosine, sine = (table.flatten(0, 1) for table in rope)
        cache = self.cache[:, layer]
        store_latents(compressed, cosine, sine, norm_weight, epsilon, cache, self._batch.slots)
        return self.backend.attend(query, cache, self.table, self._batch, scale, value_dim=len(norm_weight))


def make_backend(name: AttentionBackendName) -> AttentionBackend:
    """Return the backend of this name; `auto` and `triton` are the same."""
    return AttentionBackend(is_plain=name == "torch")
