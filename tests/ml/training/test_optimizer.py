"""AdamW is PyTorch's where both can be compared, and keeps its own promises where PyTorch has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from craton.ml.training import AdamW
from craton.ml.training.optimizer import round_stochastically


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "weight": nn.Parameter(torch.randn(8, 6).to(dtype)),
        "norm.weight": nn.Parameter(torch.randn(6).to(dtype)),
    }


def test_fp32_is_torch_adamw_with_clipping_and_no_decay_of_norms() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours.items(), weight_decay=0.1)
    groups = [
        {"params": [theirs["weight"]], "weight_decay": 0.1},
        {"params": [theirs["norm.weight"]], "weight_decay": 0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        for name in ours:
            ours[name].grad = torch.randn_like(ours[name]) * (10 if step % 2 else 0.01)
            theirs[name].grad = ours[name].grad.clone()
        norm = optimizer.step(1e-2, clip=1.0)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.values(), 1.0))
        reference.step()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    ours = parameters()
    optimizer = AdamW(ours.items())
    for parameter in ours.values():
        parameter.grad = torch.full_like(parameter, bad)
    before = {name: parameter.detach().clone() for name, parameter in ours.items()}
    optimizer.step(1e-2, clip=1.0)
    for name, parameter in ours.items():
        assert torch.equal(parameter, before[name])
    assert not any(tensor.any() for tensor in optimizer.state().values())


def test_without_clipping_the_flag_decides() -> None:
    ours = parameters()
    optimizer = AdamW(ours.items())
    before = ours["weight"].detach().clone()
    for parameter in ours.values():
        parameter.grad = torch.ones_like(parameter)
    norm = optimizer.step(1e-2, clip=0.0, finite=torch.tensor(False))
    assert norm.isnan()
    assert torch.equal(ours["weight"], before)
    optimizer.step(1e-2, clip=0.0, finite=torch.tensor(True))
    assert not torch.equal(ours["weight"], before)


def test_masters_keep_what_bf16_cannot() -> None:
    low = parameters(torch.bfloat16)
    start = low["weight"].detach().float().clone()
    full = {name: nn.Parameter(parameter.detach().float()) for name, parameter in low.items()}
    optimizer, reference = AdamW(low.items(), weights="fp32"), AdamW(full.items())
    for _ in range(50):  # each update is far below the spacing of bf16
        for name in low:
            low[name].grad = torch.ones_like(low[name])
            full[name].grad = torch.ones_like(full[name])
        optimizer.step(1e-5, clip=0.0)
        reference.step(1e-5, clip=0.0)
    torch.testing.assert_close(optimizer.master["weight"], full["weight"].detach())
    assert torch.equal(low["weight"], full["weight"].detach().to(torch.bfloat16))
    assert not torch.equal(optimizer.master["weight"], start)


def test_micro_batches_are_summed_in_fp32() -> None:
    low = {"weight": nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))}
    optimizer = AdamW(low.items(), weights="fp32")
    for _ in range(512):  # in bf16 the sum would stand still at 256
        low["weight"].grad = torch.ones(4, 4, dtype=torch.bfloat16)
        optimizer.accumulate()
    low["weight"].grad = torch.ones(4, 4, dtype=torch.bfloat16)
    assert optimizer.step(1e-3, clip=1.0).item() == pytest.approx(513 * 4)
    optimizer.zero_grad()
    low["weight"].grad = torch.ones(4, 4, dtype=torch.bfloat16)
    assert optimizer.step(1e-3, clip=1.0).item() == pytest.approx(4)


def test_stochastic_rounding_has_the_right_mean_and_keeps_exact_numbers() -> None:
    torch.manual_seed(0)
    value = torch.full((40_000,), 1.0 + 0.0078125 / 4)  # a quarter of the spacing of bf16 above one
    rounded = round_stochastically(value).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert rounded.mean().item() == pytest.approx(value[0].item(), abs=1e-4)
    exact = torch.tensor([0.0, 1.0, -2.5, 1e-30])
    assert torch.equal(round_stochastically(exact.to(torch.bfloat16).float()), exact.to(torch.bfloat16))


def test_rounding_is_the_same_when_a_step_is_done_again() -> None:
    results = []
    for _ in range(2):
        low = parameters(torch.bfloat16)
        optimizer = AdamW(low.items(), weights="bf16", seed=3)
        for parameter in low.values():
            parameter.grad = torch.ones_like(parameter)
        torch.rand(7)  # whatever else draws random numbers
        optimizer.step(1e-4)
        results.append(low["weight"].detach().clone())
    assert torch.equal(*results)


def test_state_goes_over_to_another_optimizer() -> None:
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, two = AdamW(first.items(), weights="fp32"), AdamW(second.items(), weights="fp32")
    for _ in range(3):
        for parameter in first.values():
            parameter.grad = torch.randn_like(parameter)
        one.step(1e-2)
    two.load(one.state(), one.steps)
    for optimizer, side in ((one, first), (two, second)):
        for parameter in side.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-2)
    for name in first:
        assert torch.equal(first[name], second[name])
