"""Attention over pages: Triton kernels on a GPU, torch elsewhere.

The KV cache holds the step's keys and values when `attend` is called.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from craton.ml.kernels.serving import (
    decode_attention,
    plain_decode_attention,
    plain_prefill_attention,
    prefill_attention,
)
from craton.ml.serving.settings import AttentionBackendName


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


class AttentionBackend:
    """Attention of a step's tokens over the pages of their requests. `is_plain`: torch on a GPU too, to compare."""

    def __init__(self, is_plain: bool = False) -> None:
        self._decode = plain_decode_attention if is_plain else decode_attention
        self._prefill = plain_prefill_attention if is_plain else prefill_attention
        self.can_be_captured = not is_plain

    def attend(
        self, query: Tensor, cache: Tensor, table: Tensor, batch: AttentionBatch, scale: float | None, window: int
    ) -> Tensor:
        """query [tokens, heads, head_dim], one layer's cache [blocks, 2, kv heads, page, head_dim] → as the query."""
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


def make_backend(name: AttentionBackendName) -> AttentionBackend:
    """The backend of this name; `auto` and `triton` are the same."""
    return AttentionBackend(is_plain=name == "torch")
