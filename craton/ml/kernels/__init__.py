"""The operations a decoder is made of. On CUDA they are fused Triton kernels, elsewhere and under torch.compile plain
PyTorch (`reference`), which is also what the tests compare them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from craton.ml.collectives import Peers, own_part
from craton.ml.kernels import reference
from craton.ml.kernels.attention import attention
from craton.ml.kernels.documents import Documents
from craton.ml.kernels.past import Past

__all__ = [
    "Documents",
    "Past",
    "add_norm",
    "attention",
    "gated_linears",
    "gated_mlp",
    "is_fused",
    "linear",
    "linears",
    "reference",
    "scatter_linear",
    "split_and_rotate",
    "swiglu",
    "swiglu_backward",
]


def is_fused(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _is_skinny(x: Tensor) -> bool:
    """Whether a product without gradients has so few rows that its time is that of reading the weight."""
    from craton.ml.kernels.paged import FEW_ROWS

    return not torch.is_grad_enabled() and is_fused(x) and x.numel() <= FEW_ROWS * x.shape[-1]


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, root-mean-square norm of it); x alone when there is no delta."""
    if is_fused(x) and not torch.is_grad_enabled():
        from craton.ml.kernels import triton_serving_norm

        return triton_serving_norm.add_norm(x, delta, weight, epsilon)
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, peers: Peers | None = None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias. With peers x is this rank's share of the tokens, [tokens / tp, in], the
    weight its part of the rows, and the result [tokens, out / tp]."""
    if peers is None and _is_skinny(x):
        from craton.ml.kernels.paged import skinny_linear

        return skinny_linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)
    if peers is None and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        return torch.nn.functional.linear(x, own_part(weight), None if bias is None else own_part(bias))
    from craton.ml.kernels.layers import GatherLinear

    out: Tensor = GatherLinear.apply(x, peers, bias, weight)
    return out


def linears(x: Tensor, weights: Sequence[Tensor], peers: Peers | None = None) -> tuple[Tensor, ...]:
    """`linear` with several weights, for which the tokens are gathered once."""
    if torch.compiler.is_compiling() and peers is None:
        return tuple(torch.nn.functional.linear(x, weight) for weight in weights)
    from craton.ml.kernels.layers import GatherLinear

    outs: tuple[Tensor, ...] = GatherLinear.apply(x, peers, None, *weights)
    return outs


def scatter_linear(x: Tensor, weight: Tensor, peers: Peers) -> Tensor:
    """x [tokens, in / tp] · weight [out, in / tp]ᵀ, summed over ranks: this rank's share of the tokens."""
    from craton.ml.kernels.layers import ScatterLinear

    out: Tensor = ScatterLinear.apply(x, peers, weight)
    return out


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, peers: Peers | None = None) -> Tensor:
    """down(silu(gate(x)) · up(x)); x [..., hidden], weights [out, in]. With peers x is this rank's share of the tokens
    and the weights its parts."""
    if peers is None and _is_skinny(x):
        from craton.ml.kernels.paged import skinny_gated, skinny_linear

        return skinny_linear(skinny_gated(x.flatten(0, -2), gate, up), down).view(x.shape)
    if peers is None and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        torch_linear, combine = (
            torch.nn.functional.linear,
            reference.swiglu if torch.compiler.is_compiling() else swiglu,
        )
        gate, up, down = own_part(gate), own_part(up), own_part(down)
        return torch_linear(combine(torch_linear(x, gate), torch_linear(x, up)), down)
    from craton.ml.kernels.layers import GatedMlp

    out: Tensor = GatedMlp.apply(x, gate, up, down, peers)
    return out


def gated_linears(gate: Tensor, up: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """silu(gate) · up times each weight [out, in]ᵀ, where gate and up are kept for the backward pass and are nobody
    else's: it may write over them."""
    if torch.compiler.is_compiling():
        product = reference.swiglu(gate, up)
        return tuple(torch.nn.functional.linear(product, weight) for weight in weights)
    from craton.ml.kernels.layers import GatedLinears

    outs: tuple[Tensor, ...] = GatedLinears.apply(gate, up, *weights)
    return outs


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
