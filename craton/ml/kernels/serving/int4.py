"""Weights in 4 bits with a scale, and perhaps a zero point, for each group of columns: packing and matmuls.

A weight is scale · (code - zero point) with codes from 0 to 15; without zero points they are 8. A matrix [out, in] of
codes is packed into int32 words [out, in / 8], padded to units of 128 columns: nibble n of word j of a unit is its
column 16 · n + j. So the word's bits 4 · n and 16 + 4 · n are two columns that one mask extracts, and 16 columns of a
nibble share a scale whatever the group size. On CUDA the matmuls are Triton kernels, elsewhere plain PyTorch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from craton.ml.kernels import elementwise

UNIT, WORDS, NIBBLES = 128, 16, 8  # columns of a unit, its words, codes of a word
GROUPS = (16, 32, 64)  # sizes of groups; or any multiple of UNIT
CODES, MIDDLE_CODE = 16, 8  # number of codes, and the zero point of a weight without zero points
FEW_INT4_ROWS = 64  # up to these the kernels multiply with codes; above, the weight is unpacked
SCRATCH_BYTES = 128 << 20  # of an unpacked weight
SCRATCH_OUTS = 256  # the matmul's tiles: other numbers of outputs leave multiprocessors idle, or rows unaligned


class Int4Weight(NamedTuple):
    """A packed weight: words [out, …] int32, scale [out, groups], zero [out, groups] uint8 or None."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    columns: int

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scale.shape[1]


def int4_group(group: int, columns: int) -> int | None:
    """Return the largest groups that the kernels support, of which both these groups and these columns are multiples: a
    shard may begin within a group. None: there are none."""
    common = math.gcd(group, columns)
    return common if common % UNIT == 0 else next((size for size in reversed(GROUPS) if common % size == 0), None)


def num_int4_words(columns: int) -> int:
    """Words of one output."""
    return -(-columns // UNIT) * WORDS


def pack_int4(codes: Tensor) -> Tensor:
    """Codes [out, in] uint8 → words [out, num_int4_words(in)] int32."""
    rows, columns = codes.shape
    units = pad(codes, (0, -columns % UNIT)).view(rows, -1, NIBBLES, WORDS).int()
    words = units[:, :, 0].clone()
    for number in range(1, NIBBLES):
        words |= units[:, :, number] << 4 * number
    return words.flatten(1)


def unpack_int4(words: Tensor, columns: int) -> Tensor:
    """Words → codes [out, columns] uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(1, 1, NIBBLES, 1)
    codes = (words.view(len(words), -1, 1, WORDS) >> shifts) & (CODES - 1)
    return codes.flatten(1)[:, :columns].to(torch.uint8)


def quantize_int4(
    matrix: Tensor, group: int, scale_dtype: torch.dtype, has_zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [out, in] to the nearest codes: codes, scale [out, in / group], zero point (8 if `has_zero` is
    False).

    With a zero point the codes cover the range from the smallest to the largest number of a group, and zero. A group
    with a number that is not finite gets a scale that is not finite.
    """
    groups = matrix.float().unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=-1)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    span = (
        (high - low) / (CODES - 1) if has_zero else torch.maximum(-low / MIDDLE_CODE, high / (CODES - 1 - MIDDLE_CODE))
    )
    scale = span.clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)  # a group of zeros has a scale, too
    by = scale.float()
    zero = (-low / by).round().clamp(0, CODES - 1) if has_zero else torch.full_like(by, MIDDLE_CODE)
    codes = (groups / by.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, CODES - 1)
    return codes.flatten(1).nan_to_num().to(torch.uint8), scale, zero.nan_to_num().to(torch.uint8)


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight [out, in], each number rounded once."""
    if weight.words.is_cuda:
        from craton.ml.kernels.triton import int4

        return int4.unpack(weight.words, weight.scale, weight.zero, weight.group, weight.columns, dtype)
    codes = unpack_int4(weight.words, weight.columns).float().unflatten(1, (-1, weight.group))
    zero = MIDDLE_CODE if weight.zero is None else weight.zero.float().unsqueeze(-1)
    values: Tensor = (codes - zero) * weight.scale.float().unsqueeze(-1)
    return values.flatten(1).to(dtype)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] · weightᵀ + bias. Up to FEW_INT4_ROWS rows are multiplied with the codes, which reads 4 bits a
    weight. For more rows the weight is unpacked into a scratch buffer, some outputs at a time, for the library's
    matmul."""
    if _takes_codes(x, FEW_INT4_ROWS):
        from craton.ml.kernels.triton import int4

        return int4.linear(x, weight.words, weight.scale, weight.zero, weight.group, bias)
    outs = max(1, SCRATCH_BYTES // (weight.columns * x.element_size()))
    outs -= outs % SCRATCH_OUTS if outs > SCRATCH_OUTS else 0
    if outs >= len(weight.words):
        return linear(x, dequantize_int4(weight, x.dtype), bias)
    out = x.new_empty(len(x), len(weight.words))
    for start in range(0, len(weight.words), outs):
        rows = slice(start, start + outs)
        zero = None if weight.zero is None else weight.zero[rows]
        part = Int4Weight(weight.words[rows], weight.scale[rows], zero, weight.columns)
        unpacked = dequantize_int4(part, x.dtype).t()
        if bias is None:
            torch.mm(x, unpacked, out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, unpacked, out=out[:, rows])
    return out


def int4_gated(x: Tensor, gate: Int4Weight, up: Int4Weight) -> Tensor:
    """silu(x · gateᵀ) · (x · upᵀ) for x [rows, in]; one kernel for one row, if both have the same groups."""
    is_alike = gate.group == up.group and (gate.zero is None) == (up.zero is None)
    if is_alike and _takes_codes(x, 1):
        from craton.ml.kernels.triton import int4

        return int4.gated(x, gate[:3], up[:3], gate.group)
    return elementwise.swiglu(int4_linear(x, gate), int4_linear(x, up))


def _takes_codes(x: Tensor, most: int) -> bool:
    """Whether a kernel multiplies these rows with codes, which it unpacks to their dtype."""
    return elementwise.is_fused(x) and x.dtype in (torch.bfloat16, torch.float16) and len(x) <= most
