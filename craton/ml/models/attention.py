"""Grouped-query attention with one fused projection whose rows are grouped by key/value head.

Grouped so, a slice of the rows is a whole set of heads: tensor parallelism can cut it and checkpoints stay the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from craton.ml.kernels import Documents, attention, reference, split_and_rotate
from craton.ml.models.config import DecoderConfig


class Attention(nn.Module):
    """x [rows, sequence, hidden] → the same."""

    def __init__(self, config: DecoderConfig, window: int = 0) -> None:
        super().__init__()
        shape = config.shape
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.window = window
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, width, bias=config.qkv_bias)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        norm = config.norm_epsilon
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=norm) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=norm) if shape.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Documents | None = None) -> Tensor:
        cosine, sine = rope
        qkv = self.qkv(x)
        if self.q_norm is None or self.k_norm is None:
            query, key, value = split_and_rotate(qkv, cosine, sine, self.heads, self.kv_heads, self.head_dim)
        else:
            query, key, value = reference.split_heads(qkv, self.heads, self.kv_heads, self.head_dim)
            query = reference.rotate(self.q_norm(query), cosine, sine)
            key = reference.rotate(self.k_norm(key), cosine, sine)
        out: Tensor = self.output(attention(query, key, value, documents, window=self.window).flatten(2))
        return out
