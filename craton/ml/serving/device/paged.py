"""Keys and values in pages, and the one step whose tokens attend to them."""

from __future__ import annotations

from torch import Tensor

from craton.ml.kernels.serving import Norms, Past, store, store_rotated
from craton.ml.serving.device.attention_backends import AttentionBackend, AttentionBatch


class PagedPast(Past):
    """`cache` [blocks, layers, 2, kv heads, page, head_dim]: all layers of a block lie together, so that a block moves
    between tiers in one copy."""

    def __init__(self, cache: Tensor, table: Tensor, backend: AttentionBackend) -> None:
        self.cache = cache
        self.table = table  # int32 [rows, blocks of a request]
        self.backend = backend
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """The tokens that the layers will bring next."""
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
        return self.backend.attend(query, cache, self.table, self._batch, None, window)

    def attend_expanded(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert self._batch is not None
        cache = self.cache[:, layer]
        store(key, value, cache, self._batch.slots)
        return self.backend.attend(query, cache, self.table, self._batch, scale, 0)
