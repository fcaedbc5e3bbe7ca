"""Keys and values of earlier tokens, kept outside of a model that serves. Its layers hand theirs over and get attention
over all of them back; how they are stored, and what computes, is not the model's affair."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

Norms = tuple[Tensor, Tensor, float]  # weights of the norms of queries and keys, and their epsilon


class Past(ABC):
    """What a layer sees of it. Tokens of all requests lie one after the other."""

    @abstractmethod
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
        """The fused projection [tokens, …] → attention of its queries over the past and itself, [tokens, heads, d]."""

    @abstractmethod
    def attend_expanded(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The same for queries, keys and values [tokens, heads, …] that a layer made and rotated by itself."""
