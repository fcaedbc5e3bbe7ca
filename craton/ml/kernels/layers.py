"""Linear layers and the gated MLP as autograd functions: whole or tensor parallel, with weight gradients that can be
deferred.

With peers, a rank holds some rows or columns of a weight and, between layers, its share of the tokens. A layer sharded
by rows gathers the tokens and computes some of the outputs for all of them. A layer sharded by columns takes those and
reduce-scatters the result. Only the shares are kept for the backward pass, where communication overlaps with the
matmuls that do not depend on it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from craton.ml.collectives import Peers, like, local
from craton.ml.kernels.elementwise import swiglu, swiglu_backward
from craton.ml.kernels.weight_gradients import weight_gradient


class GatherLinear(torch.autograd.Function):
    """x [tokens of this rank, in] → one [all tokens, out] for each weight [out, in]; the inputs are gathered once.

    Without peers x may have any shape [..., in]. The bias belongs to the first weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers | None, bias: Tensor | None, *weights: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.peers, ctx.bias, ctx.weights = peers, bias, weights
        inputs = x if peers is None else peers.gather(x)
        first = linear(inputs, local(weights[0]), None if bias is None else local(bias))
        if len(weights) == 1:
            return first
        return first, *(linear(inputs, local(weight)) for weight in weights[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        peers, bias, weights = ctx.peers, ctx.bias, ctx.weights
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        inputs = x.flatten(0, -2)
        is_trained = any(weight.requires_grad for weight in weights)
        if peers is not None and is_trained:
            inputs = peers.start_gather(x)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = flat[0] @ local(weights[0])
            for gradient, weight in zip(flat[1:], weights[1:], strict=True):
                grad_x.addmm_(gradient, local(weight))
            if peers is not None:
                grad_x = peers.start_scatter_sum(grad_x)
        if peers is not None and is_trained:
            inputs = peers.wait(inputs)
        of_weights = [
            weight_gradient(weight, partial(_of_weight, gradient, inputs))
            for gradient, weight in zip(flat, weights, strict=True)
        ]
        of_bias = like(bias, flat[0].sum(0)) if bias is not None and bias.requires_grad else None
        if grad_x is not None:
            grad_x = grad_x.view(x.shape) if peers is None else peers.wait(grad_x)
        return grad_x, None, of_bias, *of_weights


class ScatterLinear(torch.autograd.Function):
    """x [all tokens, in of this rank] → [tokens of this rank, out], summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.peers, ctx.weight = peers, weight
        return peers.scatter_sum(x @ local(weight).t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = ctx.peers.gather(gradient)
        grad_x = gradient @ local(ctx.weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, weight_gradient(ctx.weight, partial(_of_weight, gradient, x))


class GatedMlp(torch.autograd.Function):
    """down(silu(gate(x)) · up(x)). Keeps its input, gate and up; the backward pass recomputes their product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, peers: Peers | None = None) -> Tensor:
        inputs = x if peers is None else peers.gather(x)
        gated, lifted = linear(inputs, local(gate)), linear(inputs, local(up))
        ctx.save_for_backward(x, gated, lifted)
        ctx.weights, ctx.peers = (gate, up, down), peers
        out = linear(swiglu(gated, lifted), local(down))
        return out if peers is None else peers.scatter_sum(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gated, lifted = ctx.saved_tensors
        (gate, up, down), peers = ctx.weights, ctx.peers
        inputs, gated, lifted = x.flatten(0, -2), gated.flatten(0, -2), lifted.flatten(0, -2)
        gradient = gradient.flatten(0, -2) if peers is None else peers.gather(gradient)
        is_trained = gate.requires_grad or up.requires_grad
        if peers is not None and is_trained:
            inputs = peers.start_gather(x)
        product = gradient @ local(down)  # first the gradient of the product, then the product
        product, gated, lifted = swiglu_backward(gated, lifted, product)
        grad_down = weight_gradient(down, partial(_of_weight, gradient, product))
        del product
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gated @ local(gate)
            grad_x.addmm_(lifted, local(up))
            if peers is not None:
                grad_x = peers.start_scatter_sum(grad_x)
        if peers is not None and is_trained:
            inputs = peers.wait(inputs)
        grad_gate = weight_gradient(gate, partial(_of_weight, gated, inputs))
        grad_up = weight_gradient(up, partial(_of_weight, lifted, inputs))
        if grad_x is not None:
            grad_x = grad_x.view(x.shape) if peers is None else peers.wait(grad_x)
        return grad_x, grad_gate, grad_up, grad_down, None


class GatedLinears(torch.autograd.Function):
    """silu(gate) · up, [..., in] → one [..., out] for each weight [out, in]. Keeps gate and up; the backward pass
    recomputes their product and may overwrite them."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, lifted: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(gated, lifted)
        ctx.weights = weights
        product = swiglu(gated, lifted)
        return tuple(linear(product, local(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gated, lifted = ctx.saved_tensors
        shape, weights = gated.shape, ctx.weights
        gated, lifted = gated.flatten(0, -2), lifted.flatten(0, -2)
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        product = flat[0] @ local(weights[0])  # first the gradient of the product, then the product
        for gradient, weight in zip(flat[1:], weights[1:], strict=True):
            product.addmm_(gradient, local(weight))
        product, gated, lifted = swiglu_backward(gated, lifted, product)
        of_weights = [
            weight_gradient(weight, partial(_of_weight, gradient, product))
            for gradient, weight in zip(flat, weights, strict=True)
        ]
        return gated.view(shape), lifted.view(shape), *of_weights


def _of_weight(gradient: Tensor, inputs: Tensor) -> Tensor:
    return gradient.t() @ inputs
