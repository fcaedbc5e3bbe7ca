"""Log-probabilities of labels from hidden states, a chunk of tokens at a time: the full [tokens, vocabulary] logits
never exist.

Three forms. `linear_log_prob_loss` is for objectives that are linear in the log-probabilities (pre-training, supervised
fine-tuning): their slope is known beforehand, so the forward pass computes the gradients and nothing is computed twice.
`sloped_log_probs` is for objectives whose slope at a token depends on that token alone (most policy gradients): the
forward pass computes a chunk's log-probabilities, from them its slopes, and from these its gradients. `log_probs` is
for every other objective: it recomputes a chunk's logits in the backward pass.

With tensor parallelism (`peers`) each rank holds the hidden states of its share of the tokens and the head's rows of
its part of the vocabulary. Hidden states are gathered, each rank computes its columns of the logits, and the ranks
exchange two numbers per token (three with entropies); every rank gets the log-probabilities of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from craton.ml.collectives import Peers, like, local
from craton.ml.kernels import is_fused, reference

CHUNK_BYTES = 2 << 30  # of logits at a time; larger chunks accumulate into the head's gradient less often
PLAIN_CHUNK_BYTES = CHUNK_BYTES // 4  # with a sharded vocabulary or entropies: plain PyTorch makes fp32 copies

Slope = Callable[[Tensor], Tensor]  # log p [tokens], 0 where not known yet → d loss / d log p [tokens]


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


def sloped_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    slope: Slope,
    entropy_slope: Tensor | None = None,
    chunk: int = 0,
    peers: Peers | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log p [tokens], a zero that carries the gradient, entropies [tokens]): the zero added to a loss gives the loss
    the gradients of `slope(log p)` and of Σ entropy_slope · entropy. Neither log p nor entropies carry a gradient.
    Entropies are None without `entropy_slope`. `slope` must be token-wise: it is called once per chunk."""
    if not torch.is_grad_enabled():
        if entropy_slope is None:
            values, entropies = log_probs(hidden, weight, labels, chunk, peers), None
        else:
            values, entropies = log_probs_and_entropies(hidden, weight, labels, chunk, peers)
        return values, values.new_zeros(()), entropies
    values, zero, entropies = _SlopedLogProbs.apply(hidden, weight, labels, slope, entropy_slope, chunk, peers)
    return values, zero, entropies


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0, peers: Peers | None = None) -> Tensor:
    """log p of each label, fp32 [tokens], 0 where the label is -100; differentiable."""
    return _LogProbs.apply(hidden, weight, labels, False, chunk, peers)[0]  # type: ignore[no-any-return]


def log_probs_and_entropies(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0, peers: Peers | None = None
) -> tuple[Tensor, Tensor]:
    """(log p of each label, entropy of the distribution it is from), fp32 [tokens], 0 where the label is -100; both
    differentiable."""
    values, entropies = _LogProbs.apply(hidden, weight, labels, True, chunk, peers)
    return values, entropies


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
        made = _gradients(hidden, weight, labels, lambda rows, _: coefficients[rows], None, chunk, peers)
        ctx.save_for_backward(made.hidden, made.weight)
        ctx.mark_non_differentiable(made.log_probs)
        return (made.log_probs * coefficients).sum(), made.log_probs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*_scaled_gradients(ctx, gradient), None, None, None, None)


class _SlopedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        slope: Slope,
        entropy_slope: Tensor | None,
        chunk: int,
        peers: Peers | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.weight = weight
        hidden = hidden if peers is None else peers.gather(hidden)
        known = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)

        def coefficients(rows: slice, values: Tensor | None) -> Tensor:
            assert values is not None
            known[rows] = values
            return slope(known)[rows].contiguous()

        made = _gradients(hidden, weight, labels, coefficients, entropy_slope, chunk, peers, reads_values=True)
        ctx.save_for_backward(made.hidden, made.weight)
        ctx.mark_non_differentiable(*(item for item in (made.log_probs, made.entropies) if item is not None))
        return made.log_probs, made.log_probs.new_zeros(()), made.entropies

    @staticmethod
    def backward(ctx: Any, _: Tensor, gradient: Tensor, __: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_scaled_gradients(ctx, gradient), None, None, None, None, None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        has_entropies: bool,
        chunk: int,
        peers: Peers | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, labels)
        ctx.weight, ctx.chunk, ctx.peers, ctx.has_entropies = weight, chunk, peers, has_entropies
        hidden, part = hidden if peers is None else peers.gather(hidden), local(weight)
        values, entropies = [], []
        for rows in _chunks(hidden, part, chunk, has_entropies or peers is not None):
            logits = hidden[rows] @ part.t()
            if has_entropies:
                distribution = _Distribution.of(logits, labels[rows], peers, has_entropies=True)
                values.append(distribution.log_probs)
                entropies.append(distribution.entropies)
            else:
                values.append(_values(logits, labels[rows], peers))
        return torch.cat(values), torch.cat(entropies) if has_entropies else None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        hidden = hidden if ctx.peers is None else ctx.peers.gather(hidden)
        entropy_slope = of_entropies if ctx.has_entropies else None
        made = _gradients(
            hidden, ctx.weight, labels, lambda rows, _: gradient[rows], entropy_slope, ctx.chunk, ctx.peers
        )
        return made.hidden, None if made.weight is None else like(ctx.weight, made.weight), None, None, None, None


@dataclass(frozen=True)
class _Gradients:
    log_probs: Tensor
    entropies: Tensor | None
    hidden: Tensor  # of this rank's hidden states
    weight: Tensor | None  # of its part of the weight; None if that is not trained


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    coefficients: Callable[[slice, Tensor | None], Tensor],
    entropy_slope: Tensor | None,
    chunk: int,
    peers: Peers | None,
    reads_values: bool = False,
) -> _Gradients:
    """log p and the gradients of Σ coefficient · log p + Σ entropy_slope · entropy. `coefficients(rows, log p)` gives
    those of a chunk; with `reads_values` it gets the log-probabilities of the chunk, else None."""
    part, is_trained = local(weight), weight.requires_grad
    is_plain = peers is not None or entropy_slope is not None
    grad_hidden = torch.empty_like(hidden)
    grad_weight = None
    values, entropies = [], []
    for rows in _chunks(hidden, part, chunk, is_plain):
        logits = hidden[rows] @ part.t()
        if is_plain:
            distribution = _Distribution.of(logits, labels[rows], peers, entropy_slope is not None)
            value = distribution.log_probs
            of_entropy = None if entropy_slope is None else entropy_slope[rows]
            slope = distribution.gradient(coefficients(rows, value), of_entropy)
            entropies.append(distribution.entropies)
        else:
            known = _values(logits, labels[rows], None) if reads_values else None
            value, slope = _slopes(logits, labels[rows], coefficients(rows, known))
        torch.mm(slope, part, out=grad_hidden[rows])
        if is_trained:
            grad_weight = _accumulate(grad_weight, slope, hidden[rows])
        values.append(value)
    if peers is not None:
        grad_hidden = peers.scatter_sum(grad_hidden)
    return _Gradients(
        torch.cat(values), None if entropy_slope is None else torch.cat(entropies), grad_hidden, grad_weight
    )


def _chunks(hidden: Tensor, weight: Tensor, chunk: int, is_plain: bool) -> list[slice]:
    """Equal chunks of at most CHUNK_BYTES of logits (or `chunk` tokens, when given)."""
    tokens = hidden.shape[0]
    most = PLAIN_CHUNK_BYTES if is_plain else CHUNK_BYTES
    largest = chunk or max(1, most // (weight.shape[0] * hidden.element_size()))
    count = -(-tokens // largest)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _values(logits: Tensor, labels: Tensor, peers: Peers | None) -> Tensor:
    if peers is not None:
        return _Distribution.of(logits, labels, peers, has_entropies=False).log_probs
    if is_fused(logits):
        from craton.ml.kernels.triton import log_probs_

        return log_probs_(logits, labels, None)[0]
    has_label = labels >= 0
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked.float() - logits.float().logsumexp(-1)) * has_label


def _slopes(logits: Tensor, labels: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, d Σ coefficient · log p / d logits)."""
    if is_fused(logits):
        from craton.ml.kernels.triton import log_probs_

        values, _ = log_probs_(logits, labels, coefficients.contiguous())
        return values, logits
    return reference.log_probs_and_gradient(logits, labels, coefficients)


@dataclass(frozen=True)
class _Distribution:
    """The distributions of a chunk's tokens, of which this rank may have only some columns; plain PyTorch."""

    logits: Tensor  # [tokens, columns]
    log_sum: Tensor  # log of the sum over the whole vocabulary
    log_probs: Tensor
    entropies: Tensor
    has_label: Tensor
    index: Tensor  # the label's column here
    is_here: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, peers: Peers | None, has_entropies: bool) -> _Distribution:
        """One gather brings the other ranks' sums, label logits and, for entropies, mean log-probabilities."""
        columns = logits.shape[1]
        index = labels if peers is None else labels - peers.rank * columns
        is_here, has_label = (index >= 0) & (index < columns), labels >= 0
        index = index.clamp(0, columns - 1).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).float() * is_here
        numbers = [logits.float().logsumexp(-1), picked]
        if has_entropies:
            logs = logits.float().log_softmax(-1)
            numbers.append((logs.exp() * logs).sum(-1))
        own = torch.stack(numbers)
        gathered = (own if peers is None else peers.gather(own)).view(-1, *own.shape)  # [ranks, 2 or 3, tokens]
        log_sum = gathered[:, 0].logsumexp(0)
        entropies = torch.zeros_like(log_sum)
        if has_entropies:  # -Σ p · log p; a rank's log p is that among its own columns plus the log of their share
            shares = gathered[:, 0] - log_sum
            entropies = -(shares.exp() * (gathered[:, 2] + shares)).sum(0) * has_label
        values = (gathered[:, 1].sum(0) - log_sum) * has_label
        return cls(logits, log_sum, values, entropies, has_label, index, is_here)

    def gradient(self, coefficients: Tensor, entropy_slope: Tensor | None) -> Tensor:
        """d (Σ coefficient · log p + Σ entropy_slope · entropy) / d logits."""
        coefficients = coefficients * self.has_label
        slope = self.logits.float().sub_(self.log_sum.unsqueeze(-1))
        if entropy_slope is None:
            slope = slope.exp_().neg_()
            slope.scatter_add_(-1, self.index, self.is_here.to(slope.dtype).unsqueeze(-1))
            slope *= coefficients.unsqueeze(-1)
            return slope.to(self.logits.dtype)
        # d entropy / d z = -p · (log p + entropy)
        probabilities = slope.exp()
        slope += self.entropies.unsqueeze(-1)
        slope *= (entropy_slope * self.has_label).unsqueeze(-1)
        slope += coefficients.unsqueeze(-1)
        slope *= probabilities.neg_()
        slope.scatter_add_(-1, self.index, (coefficients * self.is_here).unsqueeze(-1))
        return slope.to(self.logits.dtype)


def _scaled_gradients(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients that the forward pass computed, times that of their loss. In place: both are only used here, and
    the head's gradient can be a gigabyte."""
    grad_hidden, grad_weight = ctx.saved_tensors
    if grad_weight is not None:
        grad_weight = like(ctx.weight, _scaled(grad_weight, factor))
    return _scaled(grad_hidden, factor), grad_weight


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    if is_fused(tensor):
        from craton.ml.kernels.triton import scale_

        return scale_(tensor, factor)
    return tensor.mul_(factor)


def _accumulate(grad_weight: Tensor | None, slope: Tensor, hidden: Tensor) -> Tensor:
    if grad_weight is None:
        return slope.t() @ hidden
    return grad_weight.addmm_(slope.t(), hidden)
