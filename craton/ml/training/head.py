"""Log-probabilities of labels from hidden states, a chunk of tokens at a time: the full [tokens, vocabulary] logits
never exist.

Two forms. `linear_log_prob_loss` is for objectives that are linear in the log-probabilities (pre-training, supervised
fine-tuning): their slope is known beforehand, so the forward pass computes the gradients and nothing is computed twice.
`log_probs` is for every other objective: it recomputes a chunk's logits in the backward pass.

With tensor parallelism (`peers`) each rank holds the hidden states of its share of the tokens and the head's rows of
its part of the vocabulary. Hidden states are gathered, each rank computes its columns of the logits, and the ranks
exchange two numbers per token; every rank gets the log-probabilities of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from craton.ml.collectives import Peers, like, local
from craton.ml.kernels import is_fused, reference

CHUNK_BYTES = 2 << 30  # of logits at a time; larger chunks accumulate into the head's gradient less often
PARTS_CHUNK_BYTES = CHUNK_BYTES // 4  # with a sharded vocabulary: plain PyTorch makes fp32 copies


def linear_log_prob_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    chunk: int = 0,
    peers: Peers | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ coefficient · log p, log p). hidden [tokens, hidden], weight [vocabulary, hidden], labels and coefficients
    [tokens]; labels of -100 are ignored. log p [tokens] carries no gradient."""
    if not torch.is_grad_enabled():
        values = log_probs(hidden, weight, labels, chunk, peers)
        return (values * coefficients).sum(), values
    loss, values = _LinearLoss.apply(hidden, weight, labels, coefficients, chunk, peers)
    return loss, values


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0, peers: Peers | None = None) -> Tensor:
    """log p of each label, fp32 [tokens], 0 where the label is -100; differentiable."""
    return _LogProbs.apply(hidden, weight, labels, chunk, peers)  # type: ignore[no-any-return]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        coefficients: Tensor,
        chunk: int,
        peers: Peers | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight = weight
        hidden = hidden if peers is None else peers.gather(hidden)
        log_prob, grad_hidden, grad_weight = _gradients(hidden, weight, labels, coefficients, chunk, peers)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(log_prob)
        return (log_prob * coefficients).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # in place: both are only used here, and the head's gradient can be a gigabyte
        if grad_weight is not None:
            grad_weight = like(ctx.weight, _scaled(grad_weight, gradient))
        return _scaled(grad_hidden, gradient), grad_weight, None, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, peers: Peers | None) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.weight, ctx.chunk, ctx.peers = weight, chunk, peers
        hidden, part = hidden if peers is None else peers.gather(hidden), local(weight)
        chunks = _chunks(hidden, part, chunk, peers)
        return torch.cat([_values(hidden[rows], part, labels[rows], peers) for rows in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        hidden = hidden if ctx.peers is None else ctx.peers.gather(hidden)
        _, grad_hidden, grad_weight = _gradients(hidden, ctx.weight, labels, gradient, ctx.chunk, ctx.peers)
        return grad_hidden, None if grad_weight is None else like(ctx.weight, grad_weight), None, None, None


def _gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor, chunk: int, peers: Peers | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log p, gradient of this rank's hidden states, of its part of the weight) of Σ coefficient · log p."""
    part, is_trained = local(weight), weight.requires_grad
    grad_hidden = torch.empty_like(hidden)
    grad_weight = None
    values = []
    for rows in _chunks(hidden, part, chunk, peers):
        value, slope = _slopes(hidden[rows], part, labels[rows], coefficients[rows], peers)
        torch.mm(slope, part, out=grad_hidden[rows])
        if is_trained:
            grad_weight = _accumulate(grad_weight, slope, hidden[rows])
        values.append(value)
    if peers is not None:
        grad_hidden = peers.scatter_sum(grad_hidden)
    return torch.cat(values), grad_hidden, grad_weight


def _chunks(hidden: Tensor, weight: Tensor, chunk: int, peers: Peers | None) -> list[slice]:
    """Equal chunks of at most CHUNK_BYTES of logits (or `chunk` tokens, when given)."""
    tokens = hidden.shape[0]
    most = CHUNK_BYTES if peers is None else PARTS_CHUNK_BYTES
    largest = chunk or max(1, most // (weight.shape[0] * hidden.element_size()))
    count = -(-tokens // largest)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _values(hidden: Tensor, weight: Tensor, labels: Tensor, peers: Peers | None) -> Tensor:
    logits = hidden @ weight.t()
    if peers is not None:
        return _in_parts(logits, labels, peers)[0]
    if is_fused(logits):
        from craton.ml.kernels.triton import log_probs_

        return log_probs_(logits, labels, None)[0]
    has_label = labels >= 0
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked.float() - logits.float().logsumexp(-1)) * has_label


def _slopes(
    hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor, peers: Peers | None
) -> tuple[Tensor, Tensor]:
    """(log p, d Σ coefficient · log p / d logits)."""
    logits = hidden @ weight.t()
    if peers is not None:
        values, log_sum, index, is_here = _in_parts(logits, labels, peers)
        slope = logits.float().sub_(log_sum.unsqueeze(-1)).exp_().neg_()
        slope.scatter_add_(-1, index, is_here.to(slope.dtype).unsqueeze(-1))
        slope *= (coefficients * (labels >= 0)).unsqueeze(-1)
        return values, slope.to(logits.dtype)
    if is_fused(logits):
        from craton.ml.kernels.triton import log_probs_

        values, _ = log_probs_(logits, labels, coefficients.contiguous())
        return values, logits
    return reference.log_probs_and_gradient(logits, labels, coefficients)


def _in_parts(logits: Tensor, labels: Tensor, peers: Peers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From this rank's columns of the logits: (log p, log of the sum over the whole vocabulary, the label's column
    here, whether it is here). One gather brings the other ranks' sums and label logits."""
    columns = logits.shape[1]
    index = labels - peers.rank * columns
    is_here = (index >= 0) & (index < columns)
    index = index.clamp(0, columns - 1).unsqueeze(-1)
    picked = logits.gather(-1, index).squeeze(-1).float() * is_here
    gathered = peers.gather(torch.stack((logits.float().logsumexp(-1), picked))).view(peers.size, 2, -1)
    log_sum = gathered[:, 0].logsumexp(0)
    return (gathered[:, 1].sum(0) - log_sum) * (labels >= 0), log_sum, index, is_here


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    if is_fused(tensor):
        from craton.ml.kernels.triton import scale_

        return scale_(tensor, factor)
    return tensor.mul_(factor)


def _accumulate(grad_weight: Tensor | None, slope: Tensor, hidden: Tensor) -> Tensor:
    if grad_weight is None:
        return slope.t() @ hidden
    return grad_weight.addmm_(slope.t(), hidden)
