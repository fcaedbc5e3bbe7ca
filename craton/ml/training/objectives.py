"""Objectives: functions of the log-probabilities of the labels, independent of the model.

An objective returns sums over tokens. The loop divides them by the objective's count of the step (by default the weight
of all labels), over all ranks and micro-batches, so the loss does not depend on how a batch is split. Two kinds of
objectives have their gradients computed in the forward pass, and logits are not kept: those that are linear in the
log-probabilities provide `coefficients`, those whose gradient at a token depends on that token alone provide `slope`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.job import Job
from craton.ml.collectives import ALONE
from craton.ml.functions import FunctionError, load_function, user_code
from craton.ml.training.batch import Batch
from craton.ml.training.head import linear_log_prob_loss, log_probs, log_probs_and_entropies, sloped_log_probs

MEAN_WEIGHT = ".weight"  # ends the name under which the weight of a mean is summed


class ObjectiveError(CratonError):
    """The job's kind has no objective."""


@dataclass(frozen=True)
class Mean:
    """A reported value with a weight of its own: both are summed over micro-batches and ranks, then divided."""

    total: Tensor
    weight: Tensor


Report = Mapping[str, Tensor | Mean]
LossFunction = Callable[..., tuple[Tensor, Report]]


def label_weight(batch: Batch) -> Tensor:
    """The default count: the weight of all labels."""
    return batch.count


def token_weight(batch: Batch) -> Tensor:
    """The default weight of each token in the entropy bonus."""
    return batch.weight


@dataclass(frozen=True)
class Objective:
    """`function(log_probs [rows, sequence], batch) -> (sum to minimise, values to report)`. With `reads` scores the
    first argument is the output of the model's scalar head, with both the scores come third. A reported tensor is a
    sum, divided by the count; a `Mean` has its own weight."""

    name: str
    function: LossFunction
    coefficients: Callable[[Batch], Tensor] | None = None  # d sum / d log_probs, if it does not depend on them
    slope: Callable[[Tensor, Batch], Tensor] | None = None  # d sum / d log_probs, token-wise
    count: Callable[[Batch], Tensor] = label_weight  # divides the sum; a sum over tokens
    reads: Literal["log_probs", "scores", "both"] = "log_probs"
    temperature: float = 1.0  # log-probabilities are those of softmax(logits / temperature)
    entropy: float = 0.0  # weight of the entropy bonus
    entropy_weight: Callable[[Batch], Tensor] = token_weight  # of each token in the bonus, which the count divides too

    def __post_init__(self) -> None:
        is_plain = self.slope is None and self.reads == "log_probs" and not self.entropy
        assert self.coefficients is None or is_plain, "a linear objective reads log-probabilities and nothing else"

    @property
    def has_own_slope(self) -> bool:
        """Whether gradients are computed in the forward pass. Objectives of users never have one."""
        return self.coefficients is not None or self.slope is not None


def token_slope(function: LossFunction) -> Callable[[Tensor, Batch], Tensor]:
    """Return the `slope` of a function whose sum has one term per token, each of which reads that token alone."""

    def slope(log_probs: Tensor, batch: Batch) -> Tensor:
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            total, _ = function(leaf, batch)
        return torch.autograd.grad(total, leaf)[0]

    return slope


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


@dataclass(frozen=True)
class Readings:
    """What an objective reads from the final hidden states of a batch; each [rows, sequence]."""

    log_probs: Tensor | None = None
    scores: Tensor | None = None
    entropies: Tensor | None = None
    zero: Tensor | None = None  # carries the gradient of log-probabilities and entropies that carry none themselves

    @classmethod
    def of(
        cls, model: nn.Module, hidden: Tensor, batch: Batch, objective: Objective, count: Tensor | None = None
    ) -> Readings:
        """Without `count` only values are read; with it also the slopes of the loss."""
        scores = None if objective.reads == "log_probs" else cast("Any", model).scores(hidden).view_as(batch.labels)
        if objective.reads == "scores":
            return cls(scores=scores)
        flat, labels = _scaled(hidden.flatten(0, -2), objective.temperature), batch.labels.flatten()
        head = cast("Tensor", model.head_weight)
        tensor = getattr(model, "connections", ALONE).tensor
        values, entropies, zero = None, None, None
        if objective.slope is not None and count is not None:
            slope, shape, divisor = objective.slope, batch.labels.shape, count
            bonus = _entropy_slope(objective, batch, count)
            values, zero, entropies = sloped_log_probs(
                flat, head, labels, lambda known: slope(known.view(shape), batch).flatten() / divisor, bonus, 0, tensor
            )
        elif objective.entropy:
            values, entropies = log_probs_and_entropies(flat, head, labels, peers=tensor)
        else:
            values = log_probs(flat, head, labels, peers=tensor)
        entropies = None if entropies is None else entropies.view_as(batch.labels)
        return cls(values.view_as(batch.labels), scores, entropies, zero)

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the objective's function."""
        if self.log_probs is None:
            return self.scores, batch
        return (self.log_probs, batch) if self.scores is None else (self.log_probs, batch, self.scores)


def batch_loss(model: nn.Module, batch: Batch, objective: Objective, count: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of one micro-batch in the step's loss and in the reported sums, see `divide_means`."""
    return hidden_loss(model, model(batch.tokens, batch.positions, batch.documents), batch, objective, count)


def hidden_loss(
    model: nn.Module, hidden: Tensor, batch: Batch, objective: Objective, count: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`batch_loss` from the final hidden states of the batch, [rows, sequence, hidden], or a share of its tokens."""
    if objective.coefficients is not None:
        flat, labels = _scaled(hidden.flatten(0, -2), objective.temperature), batch.labels.flatten()
        head = cast("Tensor", model.head_weight)
        tensor = getattr(model, "connections", ALONE).tensor
        coefficients = objective.coefficients(batch).flatten() / count
        loss, _ = linear_log_prob_loss(flat, head, labels, coefficients, peers=tensor)
        return loss, {}
    read = Readings.of(model, hidden, batch, objective, count)
    with user_code(objective.function, objective.name):
        returned = objective.function(*read.arguments(batch))
    total, report = _checked(returned, objective, read)
    loss = total / count
    if read.zero is not None:
        loss = loss + read.zero
    if read.entropies is not None:
        loss = loss - objective.entropy * (objective.entropy_weight(batch) * read.entropies).sum() / count
        report = {**report, "entropy": Mean((batch.weight * read.entropies).sum(), batch.count)}
    return loss, _sums(report, count)


def divide_means(sums: Mapping[str, Tensor], count: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return the reported values: means divided by their weights, 0 where these are 0, everything else by `count`."""
    values = {}
    for name, value in sums.items():
        if name.endswith(MEAN_WEIGHT):
            continue
        weight = sums.get(name + MEAN_WEIGHT)
        values[name] = value / count if weight is None else torch.where(weight != 0, value / weight, 0.0)
    return values


def _sums(report: Report, count: Tensor) -> dict[str, Tensor]:
    """Return a report as tensors that are summed over micro-batches and ranks."""
    sums: dict[str, Tensor] = {}
    for name, value in report.items():
        if isinstance(value, Mean):
            sums |= {name: value.total.detach(), name + MEAN_WEIGHT: value.weight.detach()}
        else:
            sums[name] = value.detach() / count
    return sums


def _scaled(hidden: Tensor, temperature: float) -> Tensor:
    """Divide the hidden states, not the logits, by the temperature: bf16 logits would be rounded once more."""
    return hidden if temperature == 1.0 else hidden / temperature


def _entropy_slope(objective: Objective, batch: Batch, count: Tensor) -> Tensor | None:
    if not objective.entropy:
        return None
    return -objective.entropy * objective.entropy_weight(batch).flatten() / count


def _checked(returned: Any, objective: Objective, read: Readings) -> tuple[Tensor, Report]:
    """Validate what a user's objective returned."""
    match returned:
        case (Tensor() as total, dict() as report) if all(
            isinstance(value, Tensor | Mean) for value in report.values()
        ):
            shapes = {"the sum": total}
            for key, value in report.items():
                shapes |= (
                    {f"{key}.total": value.total, f"{key}.weight": value.weight}
                    if isinstance(value, Mean)
                    else {key: value}
                )
            wrong = next((f"{key} has shape {list(item.shape)}" for key, item in shapes.items() if item.ndim), None)
            if wrong is None and torch.is_grad_enabled() and not total.requires_grad and read.zero is None:
                wrong = "the sum does not depend on log_probs"
        case _:
            parts = returned if isinstance(returned, tuple) else (returned,)
            wrong = "it returned " + " and ".join(type(part).__name__ for part in parts)
    if wrong is not None:
        raise FunctionError(
            f"{objective.name} must return (sum over tokens to minimise, {{name: sum to report}}), all of them tensors "
            f"without dimensions; {wrong}. See examples/custom_objective.py"
        )
    return total, report
