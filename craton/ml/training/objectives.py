"""Objectives: functions of the log-probabilities of the labels, independent of the model.

An objective returns sums over tokens. The loop divides them by the weight of all labels of the step, over all ranks and
micro-batches, so the loss does not depend on how a batch is split. An objective that is linear in the log-probabilities
provides `coefficients`: its gradient is then known before the forward pass and computed in it, and logits are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.job import Job
from craton.ml.collectives import ALONE
from craton.ml.functions import FunctionError, load_function, user_code
from craton.ml.training.batch import Batch
from craton.ml.training.head import linear_log_prob_loss, log_probs

LossFunction = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


class ObjectiveError(CratonError):
    """The job's kind has no objective."""


@dataclass(frozen=True)
class Objective:
    """`function(log_probs [rows, sequence], batch) -> (sum to minimise, sums to report)`; `coefficients(batch)`, where
    given, is d sum / d log_probs."""

    name: str
    function: LossFunction
    coefficients: Callable[[Batch], Tensor] | None = None


def cross_entropy(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-Σ w · log p(label): pretraining with w = 1; supervised fine-tuning with a loss mask, w = 1 on the answers
    only."""
    return -(batch.weight * log_probs).sum(), {}


CROSS_ENTROPY = Objective("cross_entropy", cross_entropy, coefficients=lambda batch: -batch.weight)
OBJECTIVES = {"pretrain": CROSS_ENTROPY, "sft": CROSS_ENTROPY}


def objective_of(job: Job) -> Objective:
    """Return the user's objective if the job names one, else that of the job's kind."""
    if job.objective:
        return Objective(job.objective, load_function(job.objective))
    if job.kind not in OBJECTIVES:
        raise ObjectiveError(
            f"kind {job.kind} has no objective yet; allowed: {', '.join(OBJECTIVES)}, or `objective: module:function`"
        )
    return OBJECTIVES[job.kind]


def batch_loss(model: nn.Module, batch: Batch, objective: Objective, count: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of one micro-batch in the step's loss and in the reported sums."""
    return hidden_loss(model, model(batch.tokens, batch.positions, batch.documents), batch, objective, count)


def hidden_loss(
    model: nn.Module, hidden: Tensor, batch: Batch, objective: Objective, count: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`batch_loss` from the final hidden states of the batch, [rows, sequence, hidden], or a share of its tokens."""
    flat, labels = hidden.flatten(0, -2), batch.labels.flatten()
    head = cast("Tensor", model.head_weight)
    tensor = getattr(model, "connections", ALONE).tensor
    if objective.coefficients is not None:
        coefficients = objective.coefficients(batch).flatten() / count
        loss, _ = linear_log_prob_loss(flat, head, labels, coefficients, peers=tensor)
        return loss, {}
    values = log_probs(flat, head, labels, peers=tensor).view_as(batch.labels)
    with user_code(objective.function, objective.name):
        returned = objective.function(values, batch)
    total, report = _checked(returned, objective.name)
    return total / count, {name: value.detach() / count for name, value in report.items()}


def _checked(returned: Any, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Validate what a user's objective returned."""
    match returned:
        case (Tensor() as total, dict() as report) if all(isinstance(value, Tensor) for value in report.values()):
            shapes = {"the sum": total, **report}
            wrong = next((f"{key} has shape {list(item.shape)}" for key, item in shapes.items() if item.ndim), None)
            if wrong is None and torch.is_grad_enabled() and not total.requires_grad:
                wrong = "the sum does not depend on log_probs"
        case _:
            parts = returned if isinstance(returned, tuple) else (returned,)
            wrong = "it returned " + " and ".join(type(part).__name__ for part in parts)
    if wrong is not None:
        raise FunctionError(
            f"{name} must return (sum over tokens to minimise, {{name: sum to report}}), all of them tensors without "
            f"dimensions; {wrong}. See examples/custom_objective.py"
        )
    return total, report
