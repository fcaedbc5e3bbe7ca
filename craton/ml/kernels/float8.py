"""Matrices in fp8 and their products, with scales taken from the data itself.

Values and weights are e4m3, gradients e5m2 (arXiv:2209.05433). A scale belongs to a whole tensor or to one row of it.
On CUDA numbers are converted by Triton kernels, elsewhere by plain PyTorch; products are torch's on both.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from craton.errors import CratonError
from craton.job.layout import FP8_MULTIPLE

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


def check_device(device: torch.device) -> None:
    """fp8 products need Hopper (9.0), Ada (8.9) or later."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise Float8Error(f"precision fp8 needs a GPU of Hopper's kind or later; this is a {name}: use precision bf16")


def check_sizes(name: str, rows: int, columns: int) -> None:
    """That torch's products take a weight of this size."""
    if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
        raise Float8Error(
            f"precision fp8: {name} is {rows} × {columns}; fp8 products need multiples of {FP8_MULTIPLE}; change the "
            "model or use precision bf16"
        )


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
        from craton.ml.kernels.triton import quantize as fused

        plain, turned = fused(source, row_scale, column_scale, dtype, straight, transposed)
    else:
        values = source.float()
        plain = (values * row_scale.view(-1, 1)).clamp(-largest, largest).to(dtype) if straight else None
        turned = (values * column_scale).t().clamp(-largest, largest).contiguous().to(dtype) if transposed else None
    return Quantized(plain, row_scale.reciprocal(), turned, column_scale.reciprocal())


def quantize_rows(source: Tensor) -> Quantized:
    """A matrix as e4m3 values with a scale for each row, in one pass. A row with a NaN or an infinity in it gives NaN
    in every product, and harms no other row."""
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
    """left [m, k] · right [n, k]ᵀ. `exact` keeps sums in fp32 all the way; gradients of weights need it."""
    if left_inverse.numel() > 1:
        left_inverse, right_inverse = left_inverse.view(-1, 1), right_inverse.view(1, -1)
    else:
        left_inverse, right_inverse = left_inverse.view(()), right_inverse.view(())
    if not left.is_cuda:  # oneDNN's `_scaled_mm`, which x86 has, takes one scale for a whole matrix only
        return ((left.float() @ right.t().float()) * left_inverse * right_inverse).to(dtype)
    out: Tensor = torch._scaled_mm(
        left, right.t(), left_inverse, right_inverse, out_dtype=dtype, use_fast_accum=not exact
    )
    return out
