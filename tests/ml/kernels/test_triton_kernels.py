"""The Triton kernels against plain PyTorch, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from craton.ml.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(left.float(), right.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("columns", [64, 96])
def test_add_norm_and_its_gradients(has_delta: bool, columns: int) -> None:
    from craton.ml.kernels.triton import AddNorm

    x, delta = (torch.randn(3, 5, columns, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.randn(columns, device=DEVICE, requires_grad=True)
    inputs = (x, delta, weight) if has_delta else (x, weight)
    ours = AddNorm.apply(x, delta if has_delta else None, weight, 1e-5)
    plain = reference.add_norm(x, delta if has_delta else None, weight, 1e-5)
    slopes = [torch.randn_like(part) for part in plain]
    close(ours[0], plain[0])
    close(ours[1], plain[1])
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, slopes), torch.autograd.grad(plain, inputs, slopes), strict=True
    ):
        close(mine, theirs, 1e-4)


def test_norm_without_the_gradient_of_the_sum() -> None:
    from craton.ml.kernels.triton import AddNorm

    x = torch.randn(7, 32, device=DEVICE, requires_grad=True)
    weight = torch.randn(32, device=DEVICE, requires_grad=True)
    (mine,) = torch.autograd.grad(AddNorm.apply(x, None, weight, 1e-6)[1].square().sum(), x)
    (theirs,) = torch.autograd.grad(rms_norm(x, (32,), weight, 1e-6).square().sum(), x)
    close(mine, theirs, 1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 32), (8, 1, 64)])
def test_split_and_rotate(heads: int, kv_heads: int, head_dim: int) -> None:
    from craton.ml.kernels.triton.rope import SplitAndRotate

    tokens = 21
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE, requires_grad=True)
    angle = torch.rand(tokens, head_dim // 2, device=DEVICE) * 6
    ours = SplitAndRotate.apply(qkv, angle.cos(), angle.sin(), heads, kv_heads)
    query, key, value = reference.split_heads(qkv, heads, kv_heads, head_dim)
    plain = (reference.rotate(query, angle.cos(), angle.sin()), reference.rotate(key, angle.cos(), angle.sin()), value)
    for mine, theirs in zip(ours, plain, strict=True):
        close(mine, theirs)
    slopes = [torch.randn_like(part) for part in plain]
    close(torch.autograd.grad(ours, qkv, slopes)[0], torch.autograd.grad(plain, qkv, slopes)[0], 1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_gated_mlp_and_its_gradients(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    from craton.ml.kernels.layers import GatedMlp

    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: fused)
    tensors = [
        torch.randn(*size, device=DEVICE, requires_grad=True) for size in ((11, 16), (24, 16), (24, 16), (16, 24))
    ]
    x, gate, up, down = tensors
    ours = GatedMlp.apply(*tensors)
    plain = (silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    close(ours, plain, 1e-4)
    slope = torch.randn_like(plain)
    mine = torch.autograd.grad(ours, tensors, slope)
    theirs = torch.autograd.grad(plain, tensors, slope)
    for left, right in zip(mine, theirs, strict=True):
        close(left, right, 1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_products_with_a_gated_input_and_their_gradients(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    from craton.ml.kernels.layers import GatedLinears

    monkeypatch.setattr("craton.ml.kernels.elementwise.is_fused", lambda _: fused)
    sizes = ((2, 11, 24), (2, 11, 24), (16, 24), (3, 24))
    tensors = [torch.randn(*size, device=DEVICE, requires_grad=True) for size in sizes]
    gate, up, *weights = tensors
    plain = [(silu(gate) * up) @ weight.t() for weight in weights]
    slopes = [torch.randn_like(out) for out in plain]
    theirs = torch.autograd.grad(plain, tensors, slopes)
    ours = GatedLinears.apply(*tensors)
    for left, right in zip((*ours, *torch.autograd.grad(ours, tensors, slopes)), (*plain, *theirs), strict=True):
        close(left, right, 1e-3)


def test_log_probs_and_the_gradient_in_place_of_the_logits() -> None:
    from craton.ml.kernels.triton import log_probs_

    logits = torch.randn(6, 1000, device=DEVICE) * 4
    labels = torch.tensor([5, 999, -100, 0, 17, 512], device=DEVICE)
    coefficients = torch.randn(6, device=DEVICE)
    all_sums = logits.logsumexp(-1)
    plain, slope = reference.log_probs_and_gradient(logits.clone(), labels, coefficients)
    only, sums = log_probs_(logits.clone(), labels, None)
    ours, _ = log_probs_(logits, labels, coefficients)
    close(only, plain)
    close(ours, plain)
    close(sums[labels >= 0], all_sums[labels >= 0])
    close(logits, slope, 1e-5)


@pytest.mark.parametrize("has_master", [True, False])
def test_adamw_equals_torch(has_master: bool) -> None:
    from craton.ml.kernels.triton import adamw_

    weight = torch.randn(3000, device=DEVICE)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    parameter = weight.to(torch.bfloat16) if has_master else weight.clone()
    master = weight.clone() if has_master else None
    average, square = torch.zeros_like(weight), torch.zeros_like(weight)
    control = torch.tensor([0.5, 1.0], device=DEVICE)
    for step in range(1, 4):
        gradient = torch.randn_like(weight)
        theirs.grad = gradient * 0.5
        optimizer.step()
        adamw_(parameter, gradient, average, square, master, control, 1e-2, 0.1, (0.9, 0.95), 1e-8, step, 7, False)
    close(parameter if master is None else master, theirs, 1e-5)
    if master is not None:
        close(parameter, master, 1e-2)  # the interpreter cuts where the device rounds


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    from craton.ml.kernels.triton import adamw_

    weight, gradient = torch.randn(100, device=DEVICE), torch.full((100,), float("nan"), device=DEVICE)
    before = weight.clone()
    average, square = torch.zeros_like(weight), torch.zeros_like(weight)
    control = torch.tensor([0.0, 0.0], device=DEVICE)
    adamw_(weight, gradient, average, square, None, control, 1e-2, 0.1, (0.9, 0.95), 1e-8, 1, 7, False)
    assert torch.equal(weight, before)
    assert not average.any()


@pytest.mark.slow
def test_stochastic_rounding_is_right_on_average() -> None:
    """Updates far below the spacing of bf16 move the weights by their sum, where plain rounding would lose them all."""
    from craton.ml.kernels.triton import adamw_

    count, steps, learning_rate = 20_000, 20, 1e-4  # the spacing of bf16 at 1 is 7.8e-3 above, 3.9e-3 below
    weight = torch.ones(count, device=DEVICE, dtype=torch.bfloat16)
    average, square = torch.zeros_like(weight), torch.zeros_like(weight)
    control = torch.tensor([1.0, 1.0], device=DEVICE)
    gradient = torch.ones(count, device=DEVICE, dtype=torch.bfloat16)
    for step in range(1, steps + 1):
        adamw_(
            weight,
            gradient,
            average,
            square,
            None,
            control,
            learning_rate,
            0.0,
            (0.9, 0.95),
            1e-8,
            step,
            1000 + step,
            True,
        )
    moved = 1.0 - weight.float().mean().item()
    assert moved == pytest.approx(steps * learning_rate, rel=0.1)
    assert 0.05 < (weight < 1).float().mean().item() < 0.95
