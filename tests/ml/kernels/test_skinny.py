"""Products of a few rows: the twin is the plain product, the Triton kernels equal it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from craton.ml.kernels.serving import paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(50, 300), (33, 2048), (20, 2049)]  # outputs and inputs: odd ones, one whole tile, one and a bit


@pytest.fixture(params=[False, True], ids=["twin", "triton"])
def _fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        pytest.importorskip("triton", reason="Triton is not installed")
    torch.manual_seed(0)
    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: request.param)


def close(left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """To the precision of the dtype, of the largest number there is."""
    allowed = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype] * right.abs().max().item()
    torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=allowed)


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9])
@pytest.mark.parametrize(("outs", "columns"), SIZES)
def test_linear(outs: int, columns: int, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        torch.randn(*size, device=DEVICE).to(dtype) for size in ((rows, columns), (outs, columns), (outs,))
    )
    product = x.double() @ weight.double().t()
    close(paged.skinny_linear(x, weight), product, dtype)
    close(paged.skinny_linear(x, weight, bias), product + bias.double(), dtype)


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("outs", "columns"), SIZES)
def test_gated(outs: int, columns: int, rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, columns, device=DEVICE).to(dtype)
    gate, up = (torch.randn(outs, columns, device=DEVICE).to(dtype) * columns**-0.5 for _ in range(2))
    expected = silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    close(paged.skinny_gated(x, gate, up), expected, dtype)


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("outs", "columns"), [(40, 600), (5, 8192), (3, 8200), (9, 1025)])  # 600: less than a tile
def test_weights_in_fp8_with_a_scale_for_each_output(outs: int, columns: int, rows: int) -> None:
    x = torch.randn(rows, columns, device=DEVICE)
    gate, up = (torch.randn(outs, columns, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    gate_scale, up_scale = torch.rand(2, outs, device=DEVICE) * 0.1
    bias = torch.randn(outs, device=DEVICE)
    plain_gate, plain_up = (
        x.double() @ (weight.double() * scale.double()[:, None]).t()
        for weight, scale in ((gate, gate_scale), (up, up_scale))
    )
    close(paged.skinny_linear(x, gate, bias, gate_scale), plain_gate + bias.double(), torch.float32)
    close(paged.skinny_gated(x, gate, up, gate_scale, up_scale), silu(plain_gate) * plain_up, torch.float32)
