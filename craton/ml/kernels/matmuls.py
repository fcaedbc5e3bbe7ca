"""Matmuls of a decoder: Triton kernels for a few rows, PyTorch without gradients, autograd functions with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from craton.ml.collectives import Peers, own_part
from craton.ml.kernels import elementwise, reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, peers: Peers | None = None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias. With peers x is this rank's share of the tokens, [tokens / tp, in], the
    weight its part of the rows, and the result [tokens, out / tp]."""
    if peers is None and _is_skinny(x):
        from craton.ml.kernels.serving import skinny_linear

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
        from craton.ml.kernels.serving import skinny_gated, skinny_linear

        gate, up, down = own_part(gate), own_part(up), own_part(down)
        return skinny_linear(skinny_gated(x.flatten(0, -2), gate, up), down).view(x.shape)
    if peers is None and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
        torch_linear, combine = (
            torch.nn.functional.linear,
            reference.swiglu if torch.compiler.is_compiling() else elementwise.swiglu,
        )
        gate, up, down = own_part(gate), own_part(up), own_part(down)
        return torch_linear(combine(torch_linear(x, gate), torch_linear(x, up)), down)
    from craton.ml.kernels.layers import GatedMlp

    out: Tensor = GatedMlp.apply(x, gate, up, down, peers)
    return out


def gated_linears(gate: Tensor, up: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """silu(gate) · up times each weight [out, in]ᵀ. Gate and up are kept for the backward pass, which may overwrite
    them: the caller must not use them."""
    if torch.compiler.is_compiling():
        product = reference.swiglu(gate, up)
        return tuple(torch.nn.functional.linear(product, weight) for weight in weights)
    from craton.ml.kernels.layers import GatedLinears

    outs: tuple[Tensor, ...] = GatedLinears.apply(gate, up, *weights)
    return outs


def _is_skinny(x: Tensor) -> bool:
    """Whether a matmul without gradients has so few rows that it is bound by reading the weight."""
    from craton.ml.kernels.serving import FEW_ROWS

    return not torch.is_grad_enabled() and elementwise.is_fused(x) and x.numel() <= FEW_ROWS * x.shape[-1]
