"""Element-wise operations of a decoder: fused Triton kernels on CUDA, plain PyTorch elsewhere and when compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from craton.ml.kernels import reference


def is_fused(x: Tensor) -> bool:
    """Whether the Triton kernels support this tensor."""
    return x.is_cuda and not torch.compiler.is_compiling()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, root-mean-square norm of it); without a delta, x itself."""
    if is_fused(x) and not torch.is_grad_enabled():
        from craton.ml.kernels.triton import norm

        return norm.add_norm(x, delta, weight, epsilon)
    if is_fused(x):
        from craton.ml.kernels.triton import AddNorm

        return AddNorm.apply(x, delta, weight, epsilon)  # type: ignore[no-any-return]
    return reference.add_norm(x, delta, weight, epsilon)


def split_and_rotate(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norms: reference.Norms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection [rows, sequence, …] → rotated query and key, and value, [rows, sequence, heads, head_dim].

    Tables are [rows, sequence, turning dimensions / 2]. With norms, each head of query and key is normed before it is
    rotated; their weights are [head_dim], plain tensors.
    """
    turning = 2 * cosine.shape[-1]
    if is_fused(qkv) and turning == head_dim and head_dim & (head_dim - 1) == 0:
        from craton.ml.kernels.triton import SplitAndRotate, SplitNormAndRotate

        flat = (qkv.flatten(0, 1), cosine.flatten(0, 1), sine.flatten(0, 1))
        if norms is None:
            parts = SplitAndRotate.apply(*flat, heads, kv_heads)
        else:
            parts = SplitNormAndRotate.apply(*flat, *norms, heads, kv_heads)
        query, key, value = (part.unflatten(0, qkv.shape[:2]) for part in parts)
        return query, key, value
    return reference.split_and_rotate(qkv, cosine, sine, heads, kv_heads, head_dim, norms)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, for autograd functions that write their own backward pass."""
    if is_fused(gate):
        from craton.ml.kernels.triton import swiglu as triton_swiglu

        return triton_swiglu.swiglu(gate, up)
    return reference.swiglu(gate, up)


def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up again, gradient of gate, gradient of up). The fused kernel overwrites its inputs with them."""
    if is_fused(gate):
        from craton.ml.kernels.triton import swiglu as triton_swiglu

        triton_swiglu.swiglu_backward_(gate, up, gradient)
        return gradient, gate, up
    return reference.swiglu_backward(gate, up, gradient)
