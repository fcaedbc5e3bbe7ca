"""Error of weights that are rounded to 4 bits in groups of 128, with and without zero points: `python
benchmarks/int4_rounding.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from craton.ml.kernels.serving import quantize_int4

GROUP = 128
SIZE = (1024, 4096)


def error(weight: Tensor, has_zero: bool) -> float:
    """Return the error of the rounded weight, as a share of the weight, with scales in bf16."""
    codes, scale, zero = quantize_int4(weight, GROUP, torch.bfloat16, has_zero)
    rounded = (codes.float() - zero.float().repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
    return float((rounded - weight).norm() / weight.norm())


def signed_error(weight: Tensor) -> float:
    """The same for symmetric codes whose -8 is the largest number of a group, whatever its sign."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).bfloat16().float()
    rounded = (groups / scale).round().clamp(-8, 7) * scale
    return float((rounded.flatten(1) - weight).norm() / weight.norm())


def main() -> None:
    torch.manual_seed(0)
    distributions = {
        "normal": torch.randn(SIZE),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(SIZE),
        "Student's t, 5 degrees of freedom": torch.distributions.StudentT(5.0).sample(SIZE),
    }
    print("weights | zero points | symmetric | symmetric, signed scale")
    for name, weight in distributions.items():
        print(f"{name} | {error(weight, True):.2%} | {error(weight, False):.2%} | {signed_error(weight):.2%}")


if __name__ == "__main__":
    main()
