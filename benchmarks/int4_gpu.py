"""Matmuls with 4-bit weights on a GPU: checked against plain PyTorch, and timed beside bf16: `python
benchmarks/int4_gpu.py`. Sizes are those of Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Callable

import torch
from serving_kernels_gpu import FFN_HIDDEN, HIDDEN, L2_BYTES, check, normal, seconds_of
from torch import Tensor
from torch.nn.functional import linear

from craton.ml.kernels.serving import Int4Weight, int4_gated, int4_linear, pack_int4, quantize_int4

GROUP = 128
SIZES = ((6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN_HIDDEN), (FFN_HIDDEN, HIDDEN))
ROWS = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256, 2048)


def main() -> None:
    torch.manual_seed(0)
    for rows in ROWS:
        for group, has_zero in ((128, True), (32, True), (128, False)):
            check_rows(rows, group, has_zero)
    for outs, columns in SIZES:
        weights = [normal(outs, columns, deviation=0.02) for _ in range(2 + int(4 * L2_BYTES / (2 * outs * columns)))]
        packed = [int4(weight, GROUP, has_zero=True) for weight in weights for _ in range(4)]
        for rows in ROWS:
            x = normal(rows, columns)
            ours, plain = seconds_of(calls(int4_linear, x, packed)), seconds_of(calls(linear, x, weights))
            read = packed[0].words.nbytes + packed[0].scale.nbytes + outs * columns // GROUP
            rate = f"{read / ours / 1e12:5.2f} TB/s"
            print(f"{rows:5} rows × [{outs}, {columns}] {ours * 1e6:8.1f} µs {rate}, bf16 {plain * 1e6:8.1f} µs")


def check_rows(rows: int, group: int, has_zero: bool) -> None:
    x, bias = normal(rows, 4224), normal(1000)
    gate, up = (int4(normal(1000, 4224, deviation=0.02), group, has_zero) for _ in range(2))
    check(
        f"{rows} rows, groups of {group}, zero points {has_zero}",
        lambda: (int4_linear(x, gate, bias), int4_gated(x, gate, up)),
    )


def int4(weight: Tensor, group: int, has_zero: bool) -> Int4Weight:
    codes, scale, zero = quantize_int4(weight, group, torch.bfloat16, has_zero)
    return Int4Weight(pack_int4(codes), scale, zero if has_zero else None, weight.shape[1])


def calls(
    function: Callable[..., Tensor], x: Tensor, weights: list[Tensor] | list[Int4Weight]
) -> Callable[..., Tensor]:
    return lambda index: function(x, weights[index % len(weights)])


if __name__ == "__main__":
    main()
