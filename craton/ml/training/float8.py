"""fp8 linear layers for Ada, Hopper and later: forward and both backward matmuls, with scales computed from the data.

"tensorwise": one scale per tensor, the fastest matmul. "rowwise": one per row of an operand, more accurate and slower.
Activations and weights are e4m3, gradients e5m2 (arXiv:2209.05433). Embedding, head, norms and routers are unchanged.
The input for the backward pass is kept as fp8, half the memory of bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from craton.job.layout import FP8_MULTIPLE
from craton.ml.collectives import gather, local, own_part, scatter_sum
from craton.ml.kernels import (
    GRADIENTS,
    VALUES,
    Float8Error,
    Recipe,
    check_sizes,
    product,
    product_of_turned,
    product_with_transposed,
    quantize,
    swiglu,
    swiglu_backward,
    weight_gradient,
)
from craton.ml.models import Linear, Mlp


def convert(model: nn.Module, recipe: Recipe) -> list[str]:
    """Replace the linear layers of attention and MLP in place; return their names. Call it before sharding."""
    converted = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp):
            _check(name, module.gate, module.up, module.down)
            module.__class__ = Float8Mlp
            module.recipe = recipe  # type: ignore[assignment]
            converted += [f"{name}.{part}" for part in ("gate", "up", "down")]
        for part, child in module.named_children():
            if type(child) is Linear and name.endswith("attention"):
                _check(f"{name}.{part}", child)
                child.__class__ = Float8Linear
                child.recipe = recipe  # type: ignore[assignment]
                converted.append(f"{name}.{part}")
    if not converted:
        raise Float8Error(
            "precision fp8: the model has no attention or MLP layers of Craton's decoder to convert; use precision bf16"
        )
    return converted


def _check(name: str, *layers: nn.Module) -> None:
    for layer in layers:
        assert isinstance(layer, Linear)
        check_sizes(name, layer.out_features, layer.in_features)
        layer.part_multiple = FP8_MULTIPLE


class Float8Linear(Linear):
    """A linear layer whose three matmuls are fp8. With tensor parallelism each rank has the scales of its part."""

    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == 0 and self.peers is not None:
            x = gather(x, self.peers)
        out: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.recipe)
        if self.cut == 1 and self.peers is not None:
            return scatter_sum(out, self.peers)
        bias: Tensor | None = self.bias
        out = out if bias is None else out + own_part(bias)
        return out.view(*x.shape[:-1], -1)


class Float8Mlp(Mlp):
    """The gated MLP with all nine matmuls in fp8; its input is quantized once for gate and up."""

    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.gate.weight, self.up.weight, self.down.weight)
        peers = self.connections.tensor
        if peers is not None:
            parts: Tensor = _GatedMlp.apply(gather(x, peers), *weights, self.recipe)
            return scatter_sum(parts, peers)
        out: Tensor = _GatedMlp.apply(x.flatten(0, -2), *weights, self.recipe)
        return out.view(x.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        x8 = quantize(x, recipe, VALUES)
        weight8 = quantize(local(weight), recipe, VALUES, transposed=False)
        ctx.save_for_backward(x8.transposed, x8.transposed_inverse)
        ctx.weight, ctx.recipe = weight, recipe
        return product(x8, weight8, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, x_inverse = ctx.saved_tensors
        gradient8 = quantize(gradient.contiguous(), ctx.recipe, GRADIENTS)
        weight8 = quantize(local(ctx.weight), ctx.recipe, VALUES, straight=False)
        grad_x = product_with_transposed(gradient8, weight8, gradient.dtype)
        of_weight = partial(product_of_turned, gradient8, x_turned, x_inverse, gradient.dtype)
        return grad_x, weight_gradient(ctx.weight, of_weight), None


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, recipe: Recipe) -> Tensor:
        x8 = quantize(x, recipe, VALUES)
        gated = product(x8, quantize(local(gate), recipe, VALUES, transposed=False), x.dtype)
        lifted = product(x8, quantize(local(up), recipe, VALUES, transposed=False), x.dtype)
        product8 = quantize(swiglu(gated, lifted), recipe, VALUES, transposed=False)
        ctx.save_for_backward(x8.transposed, x8.transposed_inverse, gated, lifted)
        ctx.weights, ctx.recipe = (gate, up, down), recipe
        return product(product8, quantize(local(down), recipe, VALUES, transposed=False), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, x_inverse, gated, lifted = ctx.saved_tensors
        (gate, up, down), recipe, dtype = ctx.weights, ctx.recipe, gradient.dtype
        gradient8 = quantize(gradient.contiguous(), recipe, GRADIENTS)
        hidden = product_with_transposed(gradient8, quantize(local(down), recipe, VALUES, straight=False), dtype)
        hidden, gated, lifted = swiglu_backward(gated, lifted, hidden)  # the forward product, and both gradients
        hidden8 = quantize(hidden, recipe, VALUES, straight=False)
        assert hidden8.transposed is not None
        of_down = partial(product_of_turned, gradient8, hidden8.transposed, hidden8.transposed_inverse, dtype)
        grad_down = weight_gradient(down, of_down)
        gated8, lifted8 = quantize(gated, recipe, GRADIENTS), quantize(lifted, recipe, GRADIENTS)
        grad_x = product_with_transposed(gated8, quantize(local(gate), recipe, VALUES, straight=False), dtype)
        grad_x += product_with_transposed(lifted8, quantize(local(up), recipe, VALUES, straight=False), dtype)
        grad_gate = weight_gradient(gate, partial(product_of_turned, gated8, x_turned, x_inverse, dtype))
        grad_up = weight_gradient(up, partial(product_of_turned, lifted8, x_turned, x_inverse, dtype))
        return grad_x, grad_gate, grad_up, grad_down, None
