"""Policy objectives against a numpy oracle: losses, gradients, slopes and metrics, also of a step cut between rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from packed import SLOTS, Packed, log_probs, numeric_gradient, policy_batch
from torch import Tensor

from craton.job.sections.posttraining import Policy, Rollout
from craton.ml.posttraining import policy_objective
from craton.ml.training import Batch, Mean

LOSSES = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "distill")
MAX_TOKENS = 9


def policy(loss: str, **more: Any) -> Policy:
    teacher = {"teacher": "/teacher"} if loss == "distill" else {}
    return Policy.model_validate({"loss": loss, "clip": [0.2, 0.3], **teacher, **more})


def oracle(now: np.ndarray, at: np.ndarray, packed: Packed, policy: Policy) -> float:
    """The loss of log-probabilities `now`, [sequences, tokens]; what carries no gradient reads them from `at`."""
    padded = {name: value.numpy() for name, value in packed.padded.items()}
    total = tokens = 0.0
    for i, mask in enumerate(packed.mask.bool().numpy()):
        p, q, n = now[i, mask], at[i, mask], mask.sum()
        old = padded["old_logprob"][i, mask] if "old_logprob" in padded else q
        advantage = padded["teacher_logprob"][i, mask] - q if policy.loss == "distill" else padded["advantage"][i, mask]
        ratio = np.exp(p - old)
        if policy.loss in ("rloo", "gspo"):
            ratio = np.full(n, np.exp((p - old).sum() / (n if policy.loss == "gspo" else 1)))
        low, high = 1 - policy.clip_range[0], 1 + policy.clip_range[1]
        term = -np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
        if policy.loss == "cispo":
            term = -np.clip(np.exp(q - old), low, high) * advantage * p
        gap = old - padded["rollout_logprob"][i, mask]
        if policy.correction == "truncated":
            term = term * np.minimum(np.exp(gap), 2.0)
        elif policy.correction == "sequence":
            term = term * np.exp(gap.sum()) * (np.exp(gap.sum()) <= 2.0)
        behind = padded["reference_logprob"][i, mask] - p
        term = term + policy.kl * (np.exp(behind) - behind - 1)
        total += term.mean() if policy.loss in ("grpo", "rloo", "gspo") else term.sum()
        tokens += n
    if policy.loss in ("grpo", "rloo", "gspo"):
        return total / len(now)
    return total / (len(now) * MAX_TOKENS if policy.loss == "dr_grpo" else tokens)


def found(leaf: Tensor, packed: Packed, policy: Policy) -> tuple[Tensor, dict[str, float], Tensor | None]:
    """(loss, metrics, slope [sequences, tokens])."""
    objective = policy_objective(policy, Rollout(max_tokens=MAX_TOKENS))
    values, batch = packed.pack(leaf), packed.batch
    count = objective.count(batch)
    total, report = objective.function(values, batch)
    means = {name: value for name, value in report.items() if isinstance(value, Mean)}
    metrics = {name: float(mean.total.detach() / mean.weight) for name, mean in means.items()}
    slope = None if objective.slope is None else objective.slope(values.detach(), batch) / count
    return total / count, metrics, None if slope is None else slope[packed.rows, packed.columns] * packed.mask


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("has_old", "more"),
    [
        (True, {"epochs": 2}),
        (True, {"epochs": 2, "kl": 0.1, "correction": "sequence"}),
        (False, {"kl": 0.1, "correction": "off"}),
        (False, {"correction": "sequence"}),
    ],
)
def test_losses_and_gradients_are_the_oracles(loss: str, has_old: bool, more: dict[str, Any]) -> None:
    chosen, packed = policy(loss, **more), policy_batch(has_old)
    leaf = log_probs(6, 0.4).requires_grad_()
    at = leaf.detach().numpy()
    value, _, slope = found(leaf, packed, chosen)
    assert float(value.detach()) == pytest.approx(oracle(at, at, packed, chosen), abs=1e-9)
    (gradient,) = torch.autograd.grad(value, leaf)
    wanted = numeric_gradient(lambda now: oracle(now, at, packed, chosen), at) * packed.mask.numpy()
    np.testing.assert_allclose(gradient.numpy(), wanted, atol=1e-7)
    is_coupled = loss in ("gspo", "rloo") or (more.get("correction") == "sequence" and not has_old)
    assert (slope is None) == is_coupled
    if slope is not None:
        torch.testing.assert_close(slope, gradient)


def test_ppo_adds_the_clipped_value_loss() -> None:
    chosen, packed = policy("ppo", epochs=2, value_weight=0.3), policy_batch(has_old=True)
    objective = policy_objective(chosen, Rollout())
    assert objective.reads == "both"
    leaf, scores = log_probs(6, 0.4), log_probs(7, 2.0).requires_grad_()
    count = objective.count(packed.batch)
    total, report = objective.function(packed.pack(leaf), packed.batch, packed.pack(scores))
    mask = packed.mask.bool().numpy()
    old, target = (packed.padded[name].numpy() for name in ("old_value", "return_"))

    def value_loss(values: np.ndarray) -> float:
        near = old + np.clip(values - old, -0.3, 0.3)
        return float((0.5 * np.maximum((values - target) ** 2, (near - target) ** 2))[mask].mean())

    at = scores.detach().numpy()
    of_policy = oracle(leaf.numpy(), leaf.numpy(), packed, policy("dapo", epochs=2))
    assert float(total.detach() / count) == pytest.approx(of_policy + 0.3 * value_loss(at), abs=1e-9)
    assert float(report["value_loss"].detach() / count) == pytest.approx(value_loss(at), abs=1e-9)  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(total / count, scores)
    np.testing.assert_allclose(gradient.numpy(), 0.3 * numeric_gradient(value_loss, at), atol=1e-7)


def test_metrics_are_means_over_tokens() -> None:
    chosen, packed = policy("grpo", epochs=2, kl=0.1), policy_batch(has_old=True)
    leaf = log_probs(6, 0.4)
    _, metrics, _ = found(leaf, packed, chosen)
    mask = packed.mask.bool()
    padded = {name: value[mask] for name, value in packed.padded.items()}
    gap = padded["old_logprob"] - padded["rollout_logprob"]
    ratio, advantage = (leaf[mask] - padded["old_logprob"]).exp(), padded["advantage"]
    behind = padded["reference_logprob"] - leaf[mask]
    clipped = ((ratio > 1.3) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    wanted = {
        "logprob_gap": gap.abs(),
        "logprob_k3": gap.exp() - 1 - gap,
        "corrected_share": gap.exp() > 2,
        "clipped_share": clipped,
        "entropy": -leaf[mask],
        "kl": behind.exp() - 1 - behind,
    }
    assert metrics == pytest.approx({name: float(value.double().mean()) for name, value in wanted.items()})
    assert 0 < metrics["clipped_share"] < 1
    assert 0 < metrics["corrected_share"] < 1


@pytest.mark.parametrize("loss", [*LOSSES, "ppo"])
def test_a_step_may_be_cut_between_rows(loss: str) -> None:
    packed = policy_batch(has_old=True)
    objective = policy_objective(policy(loss, epochs=2, kl=0.1), Rollout(max_tokens=MAX_TOKENS))
    scores = (packed.pack(log_probs(7)),) if loss == "ppo" else ()
    values = packed.pack(log_probs(6, 0.4))
    whole, _ = objective.function(values, packed.batch, *scores)
    parts = [
        (objective.function(values[row], _rows(packed.batch, row), *(item[row] for item in scores))[0], row)
        for row in (slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(sum(total for total, _ in parts), whole)
    counts = sum(objective.count(_rows(packed.batch, row)) for _, row in parts)
    torch.testing.assert_close(counts, objective.count(packed.batch))


def _rows(batch: Batch, rows: slice) -> Batch:
    extra = {name: tensor[rows] for name, tensor in batch.extra.items()}
    return replace(batch, tokens=batch.tokens[rows], labels=batch.labels[rows], weight=batch.weight[rows], extra=extra)


def test_extras_of_tokens_without_weight_mean_nothing() -> None:
    packed = policy_batch(has_old=True)
    chosen = policy("dapo", epochs=2, kl=0.1)
    leaf = log_probs(6, 0.4)
    before, _, slopes = found(leaf, packed, chosen)
    is_outside = packed.batch.weight == 0
    for name in ("advantage", "old_logprob", "rollout_logprob", "reference_logprob"):
        packed.batch.extra[name][is_outside] = -1e30 if name != "advantage" else 7.0
    after, _, again = found(leaf, packed, chosen)
    assert float(before) == float(after)
    assert slopes is not None
    assert again is not None
    torch.testing.assert_close(again, slopes)


def test_an_empty_slot_is_no_sequence() -> None:
    packed = policy_batch(has_old=False)
    assert packed.batch.extra["sequence_tokens"][1, SLOTS - 1] == 0
    assert policy_objective(policy("grpo"), Rollout()).count(packed.batch) == len(packed.mask)
