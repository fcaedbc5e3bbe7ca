"""The rotation of queries and keys as one autograd function over a Triton kernel: it keeps nothing but its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from craton.ml.kernels.triton import rope


class SplitAndRotate(torch.autograd.Function):
    """The fused projection [tokens, …] → rotated query and key, and value, [tokens, heads, head_dim] each."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cosine, sine)
        return rope.split_and_rotate(qkv, cosine, sine, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return rope.join_and_rotate_back(query, key, value, cosine, sine), None, None, None, None
