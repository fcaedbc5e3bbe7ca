"""fp8 layers stay near bf16 forwards and backwards; what cannot be fp8 is refused with the reason."""

from __future__ import annotations

import pytest
import torch

from craton.job.model import ModelShape
from craton.ml.kernels import Float8Error, quantize
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.training.float8 import convert

NEEDS_ROW_SCALES = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="on a CPU torch 2.11 multiplies fp8 with one scale a tensor only"
)
SHAPE = ModelShape("tiny", 2, 64, 128, 4, 2, 16, 256)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=NEEDS_ROW_SCALES)])
def test_loss_and_gradients_are_near_those_of_bf16(recipe: str) -> None:
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    results = []
    for is_fp8 in (False, True):
        model = Decoder(DecoderConfig(SHAPE)).to(torch.bfloat16)
        model.initialize(0)
        if is_fp8:
            assert len(convert(model, recipe)) == 2 * 5
        hidden = model(tokens)
        hidden.float().square().mean().backward()
        results.append((hidden.detach().float(), model.blocks[0].mlp.gate.weight.grad.float()))
    (plain, plain_gradient), (fp8, fp8_gradient) = results
    assert 0 < (fp8 - plain).norm() / plain.norm() < 0.05
    assert 0 < (fp8_gradient - plain_gradient).norm() / plain_gradient.norm() < 0.25


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_quantized_values_come_back(recipe: str) -> None:
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)) * 100
    quantized = quantize(matrix, recipe, torch.float8_e4m3fn)
    assert quantized.straight is not None
    assert quantized.transposed is not None
    back = quantized.straight.float() * quantized.straight_inverse.view(-1, 1)
    turned = quantized.transposed.float() * quantized.transposed_inverse.view(-1, 1)
    for approximate in (back, turned.t()):  # e4m3 keeps three bits: at most 1/16 off, plus the smallest steps
        assert ((approximate - matrix).abs() <= matrix.abs() / 16 + matrix.abs().max() / 448).all()


def test_a_tensor_of_zeros_has_a_scale() -> None:
    quantized = quantize(torch.zeros(16, 16), "tensorwise", torch.float8_e5m2)
    assert quantized.straight is not None
    assert quantized.straight.float().eq(0).all()
    assert quantized.straight_inverse.isfinite().all()


def test_sizes_that_fp8_cannot_multiply_are_refused() -> None:
    with pytest.raises(Float8Error, match=r"blocks\.0\.attention\.qkv is .*multiples of 16"):
        convert(Decoder(DecoderConfig(ModelShape("odd", 1, 40, 64, 4, 4, 10, 64))), "tensorwise")


def test_a_model_with_nothing_to_convert_is_told() -> None:
    with pytest.raises(Float8Error, match="no attention or MLP layers"):
        convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), "tensorwise")
