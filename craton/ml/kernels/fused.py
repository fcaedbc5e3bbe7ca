"""Parts of a block as whole autograd functions, so that what is kept for the backward pass is chosen here.

The gated MLP keeps its input, gate and up and makes the product again in the backward pass, in place; the rotation
keeps nothing but its tables. Matrix products are cuBLAS's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from craton.ml.kernels import triton_rope, triton_swiglu


class GatedMlp(torch.autograd.Function):
    """down(silu(gate(x)) · up(x)) of x [tokens, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, lifted = x @ gate.t(), x @ up.t()
        ctx.save_for_backward(x, gated, lifted, gate, up, down)
        return triton_swiglu.swiglu(gated, lifted) @ down.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, gated, lifted, gate, up, down = ctx.saved_tensors
        product = gradient @ down
        triton_swiglu.swiglu_backward_(gated, lifted, product)
        grad_down = gradient.t() @ product
        del product
        grad_x = gated @ gate
        grad_x.addmm_(lifted, up)
        return grad_x, gated.t() @ x, lifted.t() @ x, grad_down


class SplitAndRotate(torch.autograd.Function):
    """The fused projection [tokens, …] → rotated query and key, and value, [tokens, heads, head_dim] each."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cosine, sine)
        return triton_rope.split_and_rotate(qkv, cosine, sine, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return triton_rope.join_and_rotate_back(query, key, value, cosine, sine), None, None, None, None
