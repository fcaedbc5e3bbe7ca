"""Log-probabilities of labels from hidden states, a chunk of tokens at a time: tokens × vocabulary never exist at once.

Two forms. `linear_log_prob_loss` is for objectives that are linear in the log-probabilities (pre-training, supervised
fine-tuning): their slope is known beforehand, so gradients are made in the forward pass and nothing is computed twice.
`log_probs` is for every other objective: it computes a chunk's logits again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from craton.ml.kernels import is_fused, reference

CHUNK_BYTES = 2 << 30  # of logits at a time; larger chunks add to the head's gradient less often


def linear_log_prob_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """(Σ coefficient · log p, log p). hidden [tokens, hidden], weight [vocabulary, hidden], labels and coefficients
    [tokens]; labels of -100 count for nothing. log p [tokens] carries no gradient."""
    if not torch.is_grad_enabled():
        values = log_probs(hidden, weight, labels, chunk)
        return (values * coefficients).sum(), values
    loss, values = _LinearLoss.apply(hidden, weight, labels, coefficients, chunk)
    return loss, values


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0) -> Tensor:
    """log p of each label, fp32 [tokens], 0 where the label is -100; differentiable."""
    return _LogProbs.apply(hidden, weight, labels, chunk)  # type: ignore[no-any-return]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        values = []
        for rows in _chunks(hidden, weight, chunk):
            value, slope = _slopes(hidden[rows], weight, labels[rows], coefficients[rows])
            torch.mm(slope, weight, out=grad_hidden[rows])
            grad_weight = _accumulate(grad_weight, slope, hidden[rows])
            values.append(value)
        log_prob = torch.cat(values)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(log_prob)
        return (log_prob * coefficients).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # in place: both are ours alone, and the head's gradient can be a gigabyte
        return _scaled(grad_hidden, gradient), _scaled(grad_weight, gradient), None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk = chunk
        return torch.cat([_values(hidden[rows], weight, labels[rows]) for rows in _chunks(hidden, weight, chunk)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for rows in _chunks(hidden, weight, ctx.chunk):
            _, slope = _slopes(hidden[rows], weight, labels[rows], gradient[rows])
            torch.mm(slope, weight, out=grad_hidden[rows])
            grad_weight = _accumulate(grad_weight, slope, hidden[rows])
        return grad_hidden, grad_weight, None, None


def _chunks(hidden: Tensor, weight: Tensor, chunk: int) -> list[slice]:
    """Equal chunks of at most CHUNK_BYTES of logits (or `chunk` tokens, when given)."""
    tokens = hidden.shape[0]
    largest = chunk or max(1, CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
    count = -(-tokens // largest)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _values(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    if is_fused(logits):
        from craton.ml.kernels.triton_cross_entropy import log_probs_

        return log_probs_(logits, labels, None)[0]
    known = labels >= 0
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked.float() - logits.float().logsumexp(-1)) * known


def _slopes(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, d Σ coefficient · log p / d logits)."""
    logits = hidden @ weight.t()
    if is_fused(logits):
        from craton.ml.kernels.triton_cross_entropy import log_probs_

        values, _ = log_probs_(logits, labels, coefficients.contiguous())
        return values, logits
    return reference.log_probs_and_gradient(logits, labels, coefficients)


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    if is_fused(tensor):
        from craton.ml.kernels.triton_cross_entropy import scale_

        return scale_(tensor, factor)
    return tensor.mul_(factor)


def _accumulate(grad_weight: Tensor | None, slope: Tensor, hidden: Tensor) -> Tensor:
    if grad_weight is None:
        return slope.t() @ hidden
    return grad_weight.addmm_(slope.t(), hidden)
