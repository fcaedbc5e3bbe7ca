"""Linear layers in fp8 on Hopper and later: forward and both backward products, with scales taken from the data itself.

"tensorwise": one scale for each tensor, the fastest product. "rowwise": one for each row of an operand, closer to the
numbers, slower. Values and weights are e4m3, gradients e5m2 (arXiv:2209.05433). Embedding, head, norms and routers stay
as they are. What the backward pass needs of the input is kept as fp8, half the memory of bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.job import FP8_MULTIPLE
from craton.ml.collectives import gather, local, own_part, scatter_sum
from craton.ml.kernels import swiglu, swiglu_backward
from craton.ml.kernels.weight_gradients import weight_gradient
from craton.ml.models.linear import Linear
from craton.ml.models.mlp import Mlp

Recipe = Literal["tensorwise", "rowwise"]
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # of a largest value, so that a tensor of zeros has a scale


class Float8Error(CratonError):
    """The model or the machine cannot compute in fp8."""


class Quantized(NamedTuple):
    """A matrix in fp8, as it lies and transposed, each with what its numbers must be multiplied by."""

    straight: Tensor | None
    straight_inverse: Tensor
    transposed: Tensor | None
    transposed_inverse: Tensor


def convert(model: nn.Module, recipe: Recipe) -> list[str]:
    """Replaces the linear layers of attention and MLP in place; returns their names. Call it before sharding."""
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
        if layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE:
            raise Float8Error(
                f"precision fp8: {name} is {layer.out_features} × {layer.in_features}; fp8 products need multiples of "
                f"{FP8_MULTIPLE}; change the model or use precision bf16"
            )
        layer.part_multiple = FP8_MULTIPLE


def check_device(device: torch.device) -> None:
    """fp8 products need Hopper (9.0), Ada (8.9) or later."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise Float8Error(f"precision fp8 needs a GPU of Hopper's kind or later; this is a {name}: use precision bf16")


class Float8Linear(Linear):
    """A linear layer whose three products are fp8. Cut by tensor parallelism, each rank has the scales of its part."""

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
    """The gated MLP with all nine products in fp8; its input is quantized once for gate and up."""

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


def quantize(
    source: Tensor, recipe: Recipe, dtype: torch.dtype, straight: bool = True, transposed: bool = True
) -> Quantized:
    """A bf16 or fp32 matrix in fp8. Scales are chosen so that the largest value becomes the largest of fp8."""
    largest = torch.finfo(dtype).max
    if recipe == "tensorwise":
        extent = torch.linalg.vector_norm(source, float("inf"), dtype=torch.float32).clamp(min=LEAST).view(1)
        row_scale = column_scale = largest / extent
    else:
        size = source.abs()
        row_scale = largest / size.amax(1).float().clamp(min=LEAST) if straight else source.new_ones(2).float()
        column_scale = largest / size.amax(0).float().clamp(min=LEAST) if transposed else row_scale
    if source.is_cuda:
        from craton.ml.kernels.triton_float8 import quantize as fused

        plain, turned = fused(source, row_scale, column_scale, dtype, straight, transposed)
    else:
        values = source.float()
        plain = (values * row_scale.view(-1, 1)).clamp(-largest, largest).to(dtype) if straight else None
        turned = (values * column_scale).t().clamp(-largest, largest).contiguous().to(dtype) if transposed else None
    return Quantized(plain, row_scale.reciprocal(), turned, column_scale.reciprocal())


def product(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    """left [m, k] · right [n, k]ᵀ."""
    assert left.straight is not None
    assert right.straight is not None
    return _multiply(left.straight, left.straight_inverse, right.straight, right.straight_inverse, dtype)


def product_with_transposed(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    """left [m, n] · right [n, k]."""
    assert left.straight is not None
    assert right.transposed is not None
    return _multiply(left.straight, left.straight_inverse, right.transposed, right.transposed_inverse, dtype)


def product_of_turned(gradient: Quantized, x_turned: Tensor, x_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient [tokens, n]ᵀ · x [tokens, k]."""
    assert gradient.transposed is not None
    return _multiply(gradient.transposed, gradient.transposed_inverse, x_turned, x_inverse, dtype, exact=True)


def _multiply(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, dtype: torch.dtype, exact: bool = False
) -> Tensor:
    """left [m, k] · right [n, k]ᵀ. `exact` keeps sums in fp32 all the way; gradients of weights need it."""
    if left_inverse.numel() > 1:
        left_inverse, right_inverse = left_inverse.view(-1, 1), right_inverse.view(1, -1)
    else:
        left_inverse, right_inverse = left_inverse.view(()), right_inverse.view(())
    out: Tensor = torch._scaled_mm(
        left, right.t(), left_inverse, right_inverse, out_dtype=dtype, use_fast_accum=not exact
    )
    return out
