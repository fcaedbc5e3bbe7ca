"""Both heads give PyTorch's own cross entropy and gradients, however the tokens are cut into chunks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from craton.ml.training.head import linear_log_prob_loss, log_probs

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
