"""Both heads give PyTorch's own cross entropy and gradients, however the tokens are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from craton.ml.training.head import (
    linear_log_prob_loss,
    log_probs,
    log_probs_and_entropies,
    sloped_log_probs,
)

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[[3, 20]] = -100
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    return hidden, torch.randn(VOCABULARY, HIDDEN, requires_grad=True), labels


@pytest.mark.parametrize("chunk", [0, 1, 10, 37, 100])
def test_the_linear_head_is_cross_entropy(tensors: tuple[torch.Tensor, ...], chunk: int) -> None:
    hidden, weight, labels = tensors
    count = (labels >= 0).sum()
    coefficients = torch.full((TOKENS,), -1.0) / count
    loss, values = linear_log_prob_loss(hidden, weight, labels, coefficients, chunk)
    plain = cross_entropy(hidden @ weight.t(), labels)
    torch.testing.assert_close(loss, plain)
    assert not values.requires_grad
    assert values[3] == values[20] == 0
    # a factor behind the loss reaches the gradient, although that was made before
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, (hidden, weight)), torch.autograd.grad(3 * plain, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [0, 10])
def test_log_probs_carry_any_objective(tensors: tuple[torch.Tensor, ...], chunk: int) -> None:
    hidden, weight, labels = tensors
    plain = (hidden @ weight.t()).log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    ours = log_probs(hidden, weight, labels, chunk)
    torch.testing.assert_close(ours, plain)
    for mine, theirs in zip(
        torch.autograd.grad(ours.exp().square().sum(), (hidden, weight)),
        torch.autograd.grad(plain.exp().square().sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_without_gradients_only_values_are_made(tensors: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, labels = tensors
    with torch.no_grad():
        loss, values = linear_log_prob_loss(hidden, weight, labels, torch.ones(TOKENS))
    torch.testing.assert_close(loss, values.sum())


def clipped(log_probs: torch.Tensor) -> torch.Tensor:
    """One term per token, as in a policy gradient."""
    advantage = torch.linspace(-1, 1, TOKENS)
    return torch.minimum(log_probs.exp() * advantage, log_probs.exp().clamp(0.001, 0.01) * advantage).sum()


def slope(known: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = known.detach().requires_grad_()
        return torch.autograd.grad(clipped(leaf), leaf)[0]


@pytest.mark.parametrize("chunk", [0, 10])
@pytest.mark.parametrize("has_entropies", [False, True])
def test_slopes_and_entropies_have_the_gradients_of_autograd(
    tensors: tuple[torch.Tensor, ...], chunk: int, has_entropies: bool
) -> None:
    hidden, weight, labels = tensors
    known = labels >= 0
    log_softmax = (hidden @ weight.t()).log_softmax(-1)
    plain = log_softmax.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * known
    entropies = -(log_softmax.exp() * log_softmax).sum(-1) * known
    bonus = torch.linspace(0.1, 2, TOKENS) * has_entropies
    values, zero, found = sloped_log_probs(hidden, weight, labels, slope, bonus if has_entropies else None, chunk)
    torch.testing.assert_close(values, plain)
    assert not values.requires_grad
    wanted = clipped(plain) + (bonus * entropies).sum()
    losses = {"forward pass": 3 * zero}
    if has_entropies:
        assert found is not None
        torch.testing.assert_close(found, entropies)
        recomputed, also = log_probs_and_entropies(hidden, weight, labels, chunk)
        losses["recomputed"] = 3 * (clipped(recomputed) + (bonus * also).sum())
    for loss in losses.values():
        for mine, theirs in zip(
            torch.autograd.grad(loss, (hidden, weight)),
            torch.autograd.grad(3 * wanted, (hidden, weight), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=5e-5)
    with torch.no_grad():
        values, zero, _ = sloped_log_probs(hidden, weight, labels, slope, None, chunk)
        torch.testing.assert_close(values, plain)
        assert zero == 0


def test_a_slope_needs_no_second_product_with_the_head(tensors: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, labels = tensors

    def products(loss: Callable[[], torch.Tensor]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss().backward()
        return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_"))

    assert products(lambda: sloped_log_probs(hidden, weight, labels, slope)[1]) == 3
    assert products(lambda: clipped(log_probs(hidden, weight, labels))) == 4
