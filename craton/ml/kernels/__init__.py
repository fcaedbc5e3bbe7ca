"""The operations a decoder is made of. On CUDA they are fused Triton kernels, elsewhere and under torch.compile plain
PyTorch (`reference`), which is also what the tests compare them with."""

from __future__ import annotations

import torch
from torch import Tensor

from craton.ml.kernels import reference
from craton.ml.kernels.attention import Documents, attention

__all__ = [
    "Documents",
    "add_norm",
    "attention",
    "gated_mlp",
    "is_fused",
    "reference",
    "split_and_rotate",
    "swiglu",
    "swiglu_backward",
]


def is_fused(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor."""
    return x.is_cuda and not torch.compiler.is_compiling()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, root-mean-square norm of it); x alone when there is no delta."""
    if is_fused(x):
        from craton.ml.kernels.triton_norm import AddNorm

        return AddNorm.apply(x, delta, weight, epsilon)  # type: ignore[no-any-return]
    return reference.add_norm(x, delta, weight, epsilon)


def split_and_rotate(
    qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection [rows, sequence, …] → rotated query and key, and value, [rows, sequence, heads, head_dim].

    Tables are [rows, sequence, turning dimensions / 2].
    """
    turning = 2 * cosine.shape[-1]
    if is_fused(qkv) and turning == head_dim and head_dim & (head_dim - 1) == 0:
        from craton.ml.kernels.fused import SplitAndRotate

        flat = (qkv.flatten(0, 1), cosine.flatten(0, 1), sine.flatten(0, 1))
        parts = SplitAndRotate.apply(*flat, heads, kv_heads)
        query, key, value = (part.unflatten(0, qkv.shape[:2]) for part in parts)
        return query, key, value
    query, key, value = reference.split_heads(qkv, heads, kv_heads, head_dim)
    return reference.rotate(query, cosine, sine), reference.rotate(key, cosine, sine), value


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x)); x [..., hidden], weights [out, in]."""
    if is_fused(x):
        from craton.ml.kernels.fused import GatedMlp

        out: Tensor = GatedMlp.apply(x.flatten(0, -2), gate, up, down)
        return out.view(x.shape)
    linear = torch.nn.functional.linear
    return linear(reference.swiglu(linear(x, gate), linear(x, up)), down)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, for autograd functions that write their own backward pass."""
    if is_fused(gate):
        from craton.ml.kernels import triton_swiglu

        return triton_swiglu.swiglu(gate, up)
    return reference.swiglu(gate, up)


def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up once more, gradient of gate, gradient of up). The fused kernel writes them over its inputs."""
    if is_fused(gate):
        from craton.ml.kernels import triton_swiglu

        triton_swiglu.swiglu_backward_(gate, up, gradient)
        return gradient, gate, up
    return reference.swiglu_backward(gate, up, gradient)
