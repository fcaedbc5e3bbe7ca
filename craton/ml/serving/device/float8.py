"""Weights in fp8: half the memory of bf16, and half the bytes that a decode step reads.

Every linear layer of the blocks, including routed experts, keeps its weight in e4m3 with one scale per row. Large
batches are quantized row by row for fp8 matmuls. Small ones, which are bound by reading the weight, stay unquantized.
Embedding, head, norms, routers and the expansion of latents (`kv_b` of latent attention) keep their dtype. New weights
go into the same storage (`fill`), so captured CUDA graphs stay valid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from craton.ml.collectives import like, local
from craton.ml.kernels import (
    VALUES,
    Float8Error,
    Quantized,
    check_device,
    check_sizes,
    is_fused,
    product,
    quantize_rows,
    swiglu,
)
from craton.ml.kernels.serving import FEW_ROWS, skinny_gated, skinny_linear
from craton.ml.models import Decoder, Experts, LatentAttention, Linear, Mlp, rows_per_expert
from craton.ml.serving.device.layers import ServedLinear, ServedMlp

_MATRICES: dict[type, tuple[str, ...]] = {Linear: ("weight",), Experts: ("gate", "up", "down")}


@torch.no_grad()
def quantize_model(model: Decoder) -> None:
    """Quantize the blocks in place, layer by layer: at most one weight exists twice at a time. Call it after sharding
    for tensor parallelism and before adding adapters.

    It also quantizes a model on the meta device. Allocate that with `to_empty` and fill it with
    `weights.update_from_folder`: a model that fits a GPU only in fp8 then never exists in bf16.
    """
    # Attention over latents multiplies with the rows of each head of `kv_b`, transposed: there is no such fp8 matmul.
    kept = {id(module.kv_b) for module in model.modules() if isinstance(module, LatentAttention)}
    modules = [item for item in model.blocks.named_modules(prefix="blocks") if id(item[1]) not in kept]
    for name, module in modules:
        if type(module) is Linear or type(module) is Experts:
            for own in _MATRICES[type(module)]:
                _check(f"{name}.{own}", getattr(module, own))
    for _, module in modules:
        if type(module) is Linear:
            ServedFloat8Linear.convert(module)
        elif type(module) is Experts:
            Float8Experts.convert(module)
        elif type(module) is Mlp:
            module.__class__ = ServedFloat8Mlp


class ServedFloat8Linear(ServedLinear):
    """A linear layer with a scale [out] beside its weight; with tensor parallelism, both are this rank's shard."""

    weight_scale: Tensor
    dtype: torch.dtype  # of inputs and outputs

    @staticmethod
    def convert(layer: Linear) -> None:
        """Convert a layer in place."""
        layer.__class__ = ServedFloat8Linear
        assert isinstance(layer, ServedFloat8Linear)
        layer.dtype = layer.weight.dtype
        _quantize(layer, "weight")

    @property
    def skinny(self) -> tuple[Tensor, Tensor | None]:
        return local(self.weight), self.weight_scale

    def prepare(self, x: Tensor) -> Tensor | Quantized:
        return x if _are_few(x) else quantize_rows(x)

    def product(self, prepared: Any) -> Tensor:
        weight, bias = local(self.weight), self._own_bias
        if isinstance(prepared, Tensor):
            return skinny_linear(prepared, weight, bias, self.weight_scale)
        out = product(prepared, _rows(weight, self.weight_scale), self.dtype)
        return out if bias is None else out.add_(bias)

    def fill(self, name: str, part: Tensor) -> None:
        """Quantize this rank's shard of a new weight into place."""
        _fill(self, name, part)

    @property
    def _own_bias(self) -> Tensor | None:
        bias: Tensor | None = self.bias
        return None if bias is None else local(bias)


class ServedFloat8Mlp(ServedMlp):
    """The gated MLP over fp8 layers; for a few tokens gate and up are one kernel."""

    gate: ServedFloat8Linear
    up: ServedFloat8Linear
    down: ServedFloat8Linear

    def lift(self, x: Tensor) -> Tensor:
        if not _are_few(x):
            return super().lift(x)
        gate, up = self.gate, self.up
        return skinny_gated(x, local(gate.weight), local(up.weight), gate.weight_scale, up.weight_scale)


class Float8Experts(Experts):
    """Routed experts with scales [experts, out] beside gate, up and down."""

    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor

    @staticmethod
    def convert(experts: Experts) -> None:
        """Convert experts in place."""
        experts.__class__ = Float8Experts
        for name in _MATRICES[Experts]:
            _quantize(experts, name)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As `Experts.forward`."""
        if len(x) == 0:  # no rank may have routed a row here
            return x
        rows = quantize_rows(x)
        gated = _grouped_product(rows, local(self.gate), self.gate_scale, ends, x.dtype)
        lifted = _grouped_product(rows, local(self.up), self.up_scale, ends, x.dtype)
        rows = quantize_rows(swiglu(gated, lifted))
        return _grouped_product(rows, local(self.down), self.down_scale, ends, x.dtype)

    def fill(self, name: str, part: Tensor) -> None:
        """Quantize this rank's shard of a new weight into place, expert by expert."""
        _fill(self, name, part)


def _check(name: str, parameter: Tensor) -> None:
    part = local(parameter)
    check_device(part.device)
    check_sizes(f"{name} (on one rank)" if part.shape != parameter.shape else name, *part.shape[-2:])
    if part.is_cuda and part.dtype is not torch.bfloat16:
        raise Float8Error(f"precision fp8: {name} is {part.dtype}; on a GPU fp8 matmuls give bf16, so load it in bf16")


def _are_few(x: Tensor) -> bool:
    """Whether x [tokens, in] goes to the skinny kernels, which do not quantize activations."""
    return is_fused(x) and len(x) <= FEW_ROWS


def _quantize(module: nn.Module, name: str) -> None:
    """Replace a parameter by fp8 values and register their scales beside it."""
    whole: Tensor = getattr(module, name)
    part = local(whole)
    values = torch.empty_like(part, dtype=VALUES, memory_format=torch.contiguous_format)
    scale = part.new_empty(part.shape[:-1], dtype=torch.float32)
    setattr(module, name, nn.Parameter(like(whole, values), requires_grad=False))
    module.register_buffer(f"{name}_scale", scale, persistent=False)
    _fill(module, name, part)


@torch.no_grad()
def _fill(module: nn.Module, name: str, part: Tensor) -> None:
    """Quantize part [..., out, in] one matrix at a time, so that stacked experts never exist twice."""
    values, scale = local(getattr(module, name)), getattr(module, f"{name}_scale")
    matrices = zip(values.view(-1, *values.shape[-2:]), scale.view(-1, scale.shape[-1]), strict=True)
    for (own, own_scale), matrix in zip(matrices, part.view(-1, *part.shape[-2:]), strict=True):
        quantized = quantize_rows(matrix.to(own.device))
        assert quantized.straight is not None
        own.copy_(quantized.straight)
        own_scale.copy_(quantized.straight_inverse)


def _rows(weight: Tensor, scale: Tensor) -> Quantized:
    return Quantized(weight, scale, None, scale)


def _grouped_product(rows: Quantized, weight: Tensor, scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [pairs, in] sorted by expert · weight [experts, out, in]ᵀ of each one's expert → [pairs, out]."""
    values, inverse = rows.straight, rows.straight_inverse
    assert values is not None
    if values.is_cuda:
        turned = weight.transpose(-2, -1)
        out: Tensor = torch._scaled_grouped_mm(
            values, turned, inverse, scale, offs=ends, out_dtype=dtype, use_fast_accum=True
        )
        return out
    sizes = rows_per_expert(ends).tolist()  # torch has no grouped fp8 matmul off the GPU
    rest = len(values) - sum(sizes)  # rows of experts on other ranks
    *parts, _ = zip(values.split([*sizes, rest]), inverse.split([*sizes, rest]), strict=True)
    matrices = zip(parts, weight, scale, strict=True)
    outputs = [product(_rows(*part), _rows(own, own_scale), dtype) for part, own, own_scale in matrices if len(part[0])]
    return torch.cat([*outputs, values.new_zeros(rest, weight.shape[1], dtype=dtype)])
