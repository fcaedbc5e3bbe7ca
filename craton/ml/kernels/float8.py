"""fp8 matrices and matmuls, with scales computed from the data.

Activations and weights are e4m3, gradients e5m2 (arXiv:2209.05433). A scale applies to a whole tensor or to one row. On
CUDA, Triton kernels convert the numbers, elsewhere plain PyTorch; matmuls are torch's on both.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from craton.errors import CratonError
from craton.job.layout import FP8_MULTIPLE

Recipe = Literal["tensorwise", "rowwise"]
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # minimum of the largest value, so that a tensor of zeros has a scale


class Float8Error(CratonError):
    """The model or the hardware cannot compute in fp8."""


class Quantized(NamedTuple):
    """A matrix in fp8, as is and transposed, each with the inverse scale that restores its values."""

    straight: Tensor | None
    straight_inverse: Tensor
    transposed: Tensor | None
    transposed_inverse: Tensor


def check_device(device: torch.device) -> None:
    """fp8 matmuls need Ada (8.9), Hopper (9.0) or later."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise Float8Error(f"precision fp8 needs an Ada, Hopper or later GPU; this is a {name}: use precision bf16")


def check_sizes(name: str, rows: int, columns: int) -> None:
    """Check that torch's fp8 matmuls support a weight of this size."""
    if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
        raise Float8Error(
            f"precision fp8: {name} is {rows} × {columns}; fp8 matmuls need multiples of {FP8_MULTIPLE}; change the "
            "model or use precision bf16"
        )


def quantize(
    source: Tensor, recipe: Recipe, dtype: torch.dtype, straight: bool = True, transposed: bool = True
) -> Quantized:
    """Convert a bf16 or fp32 matrix to fp8. Scales map the largest value to the largest fp8 value."""
    largest = torch.finfo(dtype).max
    if recipe == "tensorwise":
        extent = torch.linalg.vector_norm(source, float("inf"), dtype=torch.float32).clamp(min=LEAST).view(1)
        row_scale = column_scale = largest / extent
    else:
        size = source.abs()
        row_scale = largest / size.amax(1).float().clamp(min=LEAST) if straight else source.new_ones(2).float()
        column_scale = largest / size.amax(0).float().clamp(min=LEAST) if transposed else row_scale
    if source.is_cuda:
        from craton.ml.kernels.triton import quantize as fused

        plain, turned = fused(source, row_scale, column_scale, dtype, straight, transposed)
    else:
        values = source.float()
        plain = (values * row_scale.view(-1, 1)).clamp(-largest, largest).to(dtype) if straight else None
        turned = (values * column_scale).t().clamp(-largest, largest).contiguous().to(dtype) if transposed else None
    return Quantized(plain, row_scale.reciprocal(), turned, column_scale.reciprocal())


def quantize_rows(source: Tensor) -> Quantized:
    """Convert a matrix to e4m3 with a scale per row, in one pass. A row with a NaN or an infinity gives NaN in every
    matmul, and does not affect other rows."""
    if source.is_cuda:
        from craton.ml.kernels.triton import quantize_rows as fused

        values, inverse = fused(source, VALUES, LEAST)
        return Quantized(values, inverse, None, inverse)
    return quantize(source, "rowwise", VALUES, transposed=False)


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
    """left [m, k] · right [n, k]ᵀ. `exact` keeps sums in fp32 throughout, which weight gradients need."""
    if left_inverse.numel() > 1 or right_inverse.numel() > 1:  # one row has one scale, too
        left_inverse, right_inverse = left_inverse.view(-1, 1), right_inverse.view(1, -1)
    else:
        left_inverse, right_inverse = left_inverse.view(()), right_inverse.view(())
    if not left.is_cuda:  # oneDNN's `_scaled_mm` (x86) supports only one scale per matrix
        return ((left.float() @ right.t().float()) * left_inverse * right_inverse).to(dtype)
    out: Tensor = torch._scaled_mm(
        left, right.t(), left_inverse, right_inverse, out_dtype=dtype, use_fast_accum=not exact
    )
    return out
