"""Grouped-query attention with one fused projection whose rows are grouped by key/value head.

With this grouping a slice of the rows is a whole set of heads: tensor parallelism shards it there, and checkpoints do
not depend on tp.
"""

from __future__ import annotations

from torch import Tensor, nn

from craton.ml.collectives import ALONE, Connections, own_part
from craton.ml.kernels import Documents, attention, split_and_rotate
from craton.ml.kernels.serving import Past
from craton.ml.models.config import DecoderConfig
from craton.ml.models.linear import Linear, Norm


class Attention(nn.Module):
    """x [rows, sequence, hidden] → the same; with tensor parallelism [rows · sequence / tp, hidden]."""

    def __init__(self, config: DecoderConfig, window: int = 0, layer: int = 0) -> None:
        super().__init__()
        self.connections: Connections = ALONE
        self.layer = layer
        shape = config.shape
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.window = window
        # The norms of heads are fused with rope, for whole heads whose size is a power of two.
        rotates_all = config.rope.rotary_dim(shape.head_dim) == shape.head_dim
        self.has_own_kernels = not shape.qk_norm or (rotates_all and shape.head_dim & (shape.head_dim - 1) == 0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = Linear(shape.hidden, width, bias=config.qkv_bias, cut=0)
        self.output = Linear(shape.heads * shape.head_dim, shape.hidden, cut=1)
        norm = config.norm_epsilon
        self.q_norm = Norm(shape.head_dim, eps=norm) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, eps=norm) if shape.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Documents | Past | None = None) -> Tensor:
        cosine, sine = rope
        tensor = self.connections.tensor
        share = 1 if tensor is None else tensor.size
        heads, kv_heads = self.heads // share, self.kv_heads // share
        qkv = self.qkv(x) if tensor is None else self.qkv(x).unflatten(0, cosine.shape[:2])
        if isinstance(documents, Past):
            flat = documents.attend(self.layer, qkv.flatten(0, 1), rope, heads, kv_heads, self._norms, self.window)
            served: Tensor = self.output(flat.flatten(1) if tensor is not None else flat.reshape(*x.shape[:2], -1))
            return served
        query, key, value = split_and_rotate(qkv, cosine, sine, heads, kv_heads, self.head_dim, self._norms)
        mixed = attention(query, key, value, documents, window=self.window, context=self.connections.context)
        out: Tensor = self.output(mixed.flatten(2) if tensor is None else mixed.flatten(2).flatten(0, 1))
        return out

    @property
    def _norms(self) -> tuple[Tensor, Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        assert self.q_norm.eps is not None
        return own_part(self.q_norm.weight), own_part(self.k_norm.weight), self.q_norm.eps
