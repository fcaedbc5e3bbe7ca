"""Sampling: from logits to the next tokens, all rows at once, without waiting for the device.

Random numbers are a function of the request's seed, the position and the token. So an answer does not depend on the
rest of its batch, and speculative decoding gives the same tokens as plain decode. Log-probabilities are those of the
model, before temperature, penalties and masks, or those of the distribution that is sampled, as each row asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from craton.ml.kernels.serving import MIN_TEMPERATURE, choose, gumbel


@dataclass(frozen=True)
class Tuning:
    """Sampling parameters of the rows beside the temperature; None where no row uses one."""

    top_k: Tensor | None = None  # int64 [rows], 0: all
    top_p: Tensor | None = None  # fp32 [rows]
    min_p: Tensor | None = None  # fp32 [rows]
    presence: Tensor | None = None  # fp32 [rows]
    frequency: Tensor | None = None  # fp32 [rows]
    repetition: Tensor | None = None  # fp32 [rows]
    written: Tensor | None = None  # int32 [rows, vocabulary], how often each token was generated
    seen: Tensor | None = None  # bool [rows, vocabulary], in the prompt or generated
    added: tuple[Tensor, Tensor, Tensor] | None = None  # row, token, logit bias
    allowed: Tensor | None = None  # int32 [rows, ⌈vocabulary / 32⌉], a bit for each token


# of each chunk: likeliest tokens, their log-probabilities, those of the targets
PromptLogprobs = list[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Chosen:
    """The next token of each row; -1 where the logits are not numbers."""

    tokens: Tensor  # int64 [rows]
    logprobs: Tensor  # fp32 [rows]
    alternatives: tuple[Tensor, Tensor] | None = None  # the likeliest tokens and their logprobs [rows, n]


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    logprob_temperature: Tensor,
    tuning: Tuning | None = None,
    alternatives: int = 0,
) -> Chosen:
    """Sample from logits [rows, vocabulary]; `positions` are those of the tokens to sample.

    `logprob_temperature` fp32 [rows]: 0 for log-probabilities of the model, else the temperature itself, for those of
    the distribution that is sampled."""
    if tuning is None:
        tokens, logprobs = choose(logits, temperature, seeds, positions, logprob_temperature)
        if not alternatives:
            return Chosen(tokens, logprobs)
        is_sampled = logprob_temperature >= MIN_TEMPERATURE
        scored = logits.float() / torch.where(is_sampled, logprob_temperature, 1.0).unsqueeze(-1)
    else:
        tokens, scored = _choose_tuned(logits.float(), temperature, seeds, positions, tuning)
        scored = torch.where((logprob_temperature > 0).unsqueeze(-1), scored, logits.float())
        logprobs = logprobs_of(scored, tokens)
        if not alternatives:
            return Chosen(tokens, logprobs)
    best, likeliest = scored.log_softmax(-1).topk(alternatives)
    return Chosen(tokens, logprobs, (likeliest, best))


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [rows] of these tokens; NaN for token -1."""
    logits = logits.float()
    logprobs = logits.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return logprobs.masked_fill(tokens < 0, torch.nan)


def _choose_tuned(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, tuning: Tuning
) -> tuple[Tensor, Tensor]:
    """Return the tokens [rows], and the logits of the distributions that they are samples of [rows, vocabulary]."""
    is_number = logits.max(-1).values.isfinite() & ~logits.isnan().any(-1)
    logits = _penalize(logits, tuning)
    if tuning.added is not None:
        rows, tokens, values = tuning.added
        logits = logits.index_put((rows, tokens), values, accumulate=True)
    if tuning.allowed is not None:
        logits = logits.masked_fill(~unpack_bits(tuning.allowed, logits.shape[-1]), -torch.inf)
    is_random = temperature > 0
    scaled = logits / torch.where(is_random, temperature, 1.0).unsqueeze(-1)
    scaled = _truncate(scaled, tuning)
    noise = gumbel(seeds, positions, logits.shape[-1])
    tokens = torch.where(is_random.unsqueeze(-1), scaled + noise, logits).argmax(-1)
    return tokens.masked_fill(~is_number, -1), scaled


def _penalize(logits: Tensor, tuning: Tuning) -> Tensor:
    if tuning.repetition is not None and tuning.seen is not None:
        factor = tuning.repetition.unsqueeze(-1)
        penalized = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(tuning.seen, penalized, logits)
    if tuning.written is not None:
        if tuning.frequency is not None:
            logits = logits - tuning.frequency.unsqueeze(-1) * tuning.written
        if tuning.presence is not None:
            logits = logits - tuning.presence.unsqueeze(-1) * (tuning.written > 0)
    return logits


def _truncate(logits: Tensor, tuning: Tuning) -> Tensor:
    """Keep the top_k tokens, of these the fewest whose probabilities reach top_p, and of these all with a probability
    of min_p times the largest or more."""
    if tuning.top_k is not None or tuning.top_p is not None:
        ordered, order = logits.sort(-1, descending=True)
        place = torch.arange(logits.shape[-1], device=logits.device)
        if tuning.top_k is not None:
            kept = torch.where(tuning.top_k > 0, tuning.top_k, logits.shape[-1]).unsqueeze(-1)
            ordered = ordered.masked_fill(place >= kept, -torch.inf)
        if tuning.top_p is not None:
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all that are likelier
            ordered = ordered.masked_fill((before >= tuning.top_p.unsqueeze(-1)) & (place > 0), -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    if tuning.min_p is not None:
        threshold = logits.max(-1, keepdim=True).values + tuning.min_p.unsqueeze(-1).log()
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """int32 [rows, words] → bool [rows, count], lowest bit first."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(-2)[..., :count]
