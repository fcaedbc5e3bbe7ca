"""Preference objectives against a numpy oracle: losses, gradients and metrics of pairs that share rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from packed import PAIRS, numeric_gradient, preference_batch

from craton.job.sections.posttraining import Preference
from craton.ml.posttraining import preference_objective

LOSSES = ("dpo", "ipo", "simpo", "orpo", "reward")


def oracle(values: np.ndarray, loss: str, beta: float) -> tuple[float, dict[str, float]]:
    """(mean loss of the pairs, mean rewards)."""
    batch, _, pairs = preference_batch()
    losses, rewards = [], []
    for row, slot, chosen, rejected in pairs:
        p, q = values[row, chosen], values[row, rejected]
        reference = batch.extra["reference"][row, slot].numpy()
        if loss == "reward":
            good, bad = p[-1], q[-1]
        elif loss == "dpo":
            good, bad = beta * (p.sum() - reference[0]), beta * (q.sum() - reference[1])
        elif loss == "ipo":
            good, bad = beta * (p.sum() - reference[0]) / len(p), beta * (q.sum() - reference[1]) / len(q)
        else:
            good, bad = beta * p.mean(), beta * q.mean()
        rewards.append((good, bad))
        if loss == "ipo":
            losses.append(((good - bad) / beta - 1 / (2 * beta)) ** 2)
        elif loss == "orpo":
            odds = [np.exp(mean) / (1 - np.exp(mean)) for mean in (p.mean(), q.mean())]
            losses.append(-p.mean() + beta * np.log1p(odds[1] / odds[0]))
        else:
            losses.append(np.log1p(np.exp(-(good - bad - (1.0 if loss == "simpo" else 0.0)))))
    good, bad = np.array(rewards).T
    report = {"chosen_reward": good, "rejected_reward": bad, "reward_margin": good - bad, "reward_accuracy": good > bad}
    return float(np.mean(losses)), {name: float(np.mean(value)) for name, value in report.items()}


@pytest.mark.parametrize(
    ("loss", "beta"), [*((loss, None) for loss in LOSSES), *((loss, 0.5) for loss in LOSSES if loss != "reward")]
)
def test_losses_gradients_and_rewards_are_the_oracles(loss: str, beta: float | None) -> None:
    preference = Preference.model_validate({"loss": loss, **({} if beta is None else {"beta": beta})})
    objective = preference_objective(preference)
    assert objective.reads == ("scores" if loss == "reward" else "log_probs")
    batch, values, pairs = preference_batch()
    values.requires_grad_()
    count = objective.count(batch)
    assert count == len(pairs)
    total, report = objective.function(values, batch)
    at = values.detach().numpy()
    wanted, rewards = oracle(at, loss, preference.scale)
    assert float(total.detach() / count) == pytest.approx(wanted, abs=1e-9)
    assert {name: float(value.detach() / count) for name, value in report.items()} == pytest.approx(rewards)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(total / count, values)
    numeric = numeric_gradient(lambda now: oracle(now, loss, preference.scale)[0], at)
    np.testing.assert_allclose(gradient.numpy(), numeric, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_may_be_cut_between_rows(loss: str) -> None:
    objective = preference_objective(Preference.model_validate({"loss": loss}))
    batch, values, _ = preference_batch()
    whole, _ = objective.function(values, batch)
    total, count = 0.0, 0.0
    for row in range(len(PAIRS)):
        rows = slice(row, row + 1)
        extra = {name: tensor[rows] for name, tensor in batch.extra.items()}
        part: Any = replace(batch, labels=batch.labels[rows], weight=batch.weight[rows], extra=extra)
        total, count = total + float(objective.function(values[rows], part)[0]), count + float(objective.count(part))
    assert total == pytest.approx(float(whole))
    assert count == float(objective.count(batch))


def test_a_certain_sequence_has_a_finite_orpo_loss() -> None:
    objective = preference_objective(Preference(loss="orpo"))
    batch, values, _ = preference_batch()
    certain = torch.zeros_like(values).requires_grad_()
    total, _ = objective.function(certain, batch)
    (gradient,) = torch.autograd.grad(total, certain)
    assert bool(total.isfinite())
    assert bool(gradient.isfinite().all())
