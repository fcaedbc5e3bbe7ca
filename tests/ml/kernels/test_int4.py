"""4-bit weights: rounding and packing, and the Triton kernels against their plain twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from craton.ml.kernels.serving import Int4Weight, int4, int4_gated, int4_group, int4_linear, pack_int4, quantize_int4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # Triton's interpreter has no arithmetic in bf16
# (outputs, inputs, group, has zero points, rows): padded units, each group size within a unit and beyond it, each tile
SMALL = [(20, 96, 32, True, 3)]
LARGE = [(9, 80, 16, False, 1), (17, 192, 64, True, 3), (50, 1024, 128, True, 1), (40, 640, 640, False, 8)]
LARGE += [(33, 512, 256, True, 16), (70, 576, 64, True, 20), (70, 256, 128, False, 64), (70, 1200, 16, True, 70)]
LARGE += [(9, 2176, 32, True, 1), (7, 4096, 128, True, 1), (5, 1152, 64, False, 1), (131, 128, 64, True, 1)]
CASES = [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)]


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: True)


def packed(outs: int, columns: int, group: int, has_zero: bool, seed: int = 0) -> tuple[Int4Weight, Tensor]:
    """A weight, and what its codes mean in float64."""
    matrix = torch.randn(outs, columns, generator=torch.Generator().manual_seed(seed))
    codes, scale, zero = quantize_int4(matrix, group, torch.float16, has_zero)
    exact = (codes.double() - zero.double().repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)
    weight = Int4Weight(pack_int4(codes).to(DEVICE), scale.to(DEVICE), zero.to(DEVICE) if has_zero else None, columns)
    return weight, exact.to(DEVICE)


def close(got: Tensor, wanted: Tensor) -> None:
    """To a rounding of the largest number: sums are in fp32, and only the result is rounded."""
    allowed = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 2e-6}[got.dtype] * float(wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=allowed)


def test_a_word_holds_columns_that_are_16_apart() -> None:
    codes = torch.randint(0, 16, (3, 300), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack_int4(codes)
    assert words.shape == (3, 48)
    padded = np.pad(codes.numpy(), ((0, 0), (0, 84)))
    for unit, word, nibble in [(0, 0, 0), (1, 5, 7), (0, 15, 3), (2, 11, 2)]:
        found = words.numpy().view(np.uint32)[:, unit * 16 + word] >> 4 * nibble & 15
        assert (found == padded[:, unit * 128 + 16 * nibble + word]).all()
    assert torch.equal(int4.unpack_int4(words, 300), codes)


@pytest.mark.parametrize("has_zero", [True, False])
def test_rounding_is_to_the_nearest_code(has_zero: bool) -> None:
    matrix = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    matrix[0, :128] = 0.0
    matrix[1, :128] = matrix[1, :128].abs()  # codes must cover zero, too
    codes, scale, zero = quantize_int4(matrix, 128, torch.float32, has_zero)
    kept = (codes.float() - zero.float().repeat_interleave(128, 1)) * scale.repeat_interleave(128, 1)
    assert ((kept - matrix).abs() <= 0.5001 * scale.repeat_interleave(128, 1)).all()
    assert torch.equal(kept[0, :128], matrix[0, :128])


def test_zero_points_make_the_error_smaller() -> None:
    """Why weights that are rounded at load have them."""
    for matrix in (torch.randn(64, 1024), torch.distributions.Laplace(0.0, 1.0).sample((64, 1024))):
        errors = []
        for has_zero in (True, False):
            codes, scale, zero = quantize_int4(matrix, 128, torch.bfloat16, has_zero)
            weight = Int4Weight(pack_int4(codes), scale, zero if has_zero else None, 1024)
            errors.append(float((int4.dequantize_int4(weight, torch.float32) - matrix).norm() / matrix.norm()))
        assert errors[0] < 0.93 * errors[1]


def test_groups_of_a_shard_divide_the_stored_ones() -> None:
    assert [int4_group(128, columns) for columns in (4096, 2752, 96, 80, 72)] == [128, 64, 32, 16, None]
    assert int4_group(4096, 1024) == 1024
    assert int4_group(100, 100) is None


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "columns", "group", "has_zero", "rows"), CASES)
def test_kernels_multiply_with_codes(
    outs: int, columns: int, group: int, has_zero: bool, rows: int, dtype: torch.dtype
) -> None:
    weight, exact = packed(outs, columns, group, has_zero)
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(DEVICE, dtype)
    bias = torch.randn(outs, generator=generator).to(DEVICE, dtype)
    product = x.double() @ exact.t()
    close(int4_linear(x, weight, bias), product + bias.double())
    if rows == 1:  # a kernel of its own
        up, exact_up = packed(outs, columns, group, has_zero, seed=1)
        close(int4_gated(x, weight, up), silu(product) * (x.double() @ exact_up.t()))


@pytest.mark.parametrize(("outs", "columns", "group", "has_zero", "rows"), [*SMALL, *LARGE])
def test_twin_multiplies_with_the_weight(outs: int, columns: int, group: int, has_zero: bool, rows: int) -> None:
    weight, exact = packed(outs, columns, group, has_zero)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2), device="cpu").to(DEVICE)
    close(int4_linear(x, weight), x.double() @ exact.t())
    up, exact_up = packed(outs, columns, group, not has_zero, seed=1)  # other groups: two matmuls
    close(int4_gated(x, weight, up), silu(x.double() @ exact.t()) * (x.double() @ exact_up.t()))


def test_many_rows_unpack_some_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, exact = packed(50, 96, 32, has_zero=True)
    x, bias = torch.randn(80, 96, device=DEVICE), torch.randn(50, device=DEVICE)
    whole = int4_linear(x, weight, bias)
    monkeypatch.setattr(int4, "SCRATCH_BYTES", 7 * 96 * 4)  # seven outputs
    torch.testing.assert_close(int4_linear(x, weight, bias), whole)
    torch.testing.assert_close(int4_linear(x, weight), whole - bias)
    close(whole, x.double() @ exact.t() + bias.double())


@pytest.mark.parametrize("has_zero", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernel_unpacks_what_the_twin_unpacks(has_zero: bool) -> None:
    fused = pytest.importorskip("craton.ml.kernels.triton.int4", reason="Triton is not installed")
    weight, exact = packed(20, 1200, 16, has_zero)
    unpacked = fused.unpack(weight.words, weight.scale, weight.zero, 16, 1200, torch.float32)
    assert torch.equal(unpacked.double(), exact)


def test_bits_of_a_code_are_a_number() -> None:
    """What the interpreter cannot run in bf16: a code in the low bits of these numbers counts ones."""
    fused = pytest.importorskip("craton.ml.kernels.triton.int4", reason="Triton is not installed")
    for dtype, (base, bits) in fused.ONES.items():
        numbers = (torch.arange(16, dtype=torch.int16) | bits).view(dtype)
        assert numbers.tolist() == [base + code for code in range(16)]
        assert (numbers - torch.tensor(base + 15, dtype=dtype)).tolist() == [code - 15 for code in range(16)]
