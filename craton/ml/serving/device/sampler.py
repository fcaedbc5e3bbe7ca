"""Sampling: from logits to the next tokens, all rows at once, without waiting for the device.

Random numbers are a function of the request's seed, the position and the token. So an answer does not depend on the
rest of its batch, and speculative decoding gives the same tokens as plain decode. Log-probabilities are those of the
model, before temperature, penalties and masks, or those of the distribution that is sampled, as each row asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from craton.ml.kernels.serving import MIN_TEMPERATURE, choose, choose_kept, truncate


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
    tuning = tuning or Tuning()
    where = (temperature, seeds, positions, logprob_temperature)
    adjusted = _adjust(logits, tuning)
    cuts = (tuning.top_k, tuning.top_p, tuning.min_p)
    is_cut = any(cut is not None for cut in cuts)
    tokens, logprobs = choose_kept(adjusted, *where, *cuts) if is_cut else choose(adjusted, *where)
    is_sampled = logprob_temperature >= MIN_TEMPERATURE
    if tuning.allowed is not None:  # the mask may hide logits that are not numbers
        tokens = tokens.masked_fill(~logits.amax(-1).isfinite(), -1)
        logprobs = logprobs.masked_fill(tokens < 0, torch.nan)
    if adjusted is not logits:
        logprobs = torch.where(is_sampled, logprobs, logprobs_of(logits, tokens))
    if not alternatives:
        return Chosen(tokens, logprobs)
    scored = torch.where(is_sampled[:, None], truncate(adjusted, temperature, *cuts), logits.float())
    best, likeliest = scored.log_softmax(-1).topk(alternatives)
    return Chosen(tokens, logprobs, (likeliest, best))


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [rows] of these tokens; NaN for token -1. Tokens beyond the vocabulary do no harm: while
    kernels only compile, tokens are what their memory held."""
    logits = logits.float()
    logprobs = logits.gather(-1, tokens.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return logprobs.masked_fill(tokens < 0, torch.nan)


def _adjust(logits: Tensor, tuning: Tuning) -> Tensor:
    """Return the logits after penalties, logit bias and grammar, in fp32; the same tensor if there is none of them."""
    if tuning.repetition is not None or tuning.frequency is not None or tuning.presence is not None:
        logits = _penalize(logits.float(), tuning)
    if tuning.added is not None:
        rows, tokens, values = tuning.added
        logits = logits.float().index_put((rows, tokens), values, accumulate=True)
    if tuning.allowed is not None:
        logits = logits.float().masked_fill(~unpack_bits(tuning.allowed, logits.shape[-1]), -torch.inf)
    return logits


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


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """int32 [rows, words] → bool [rows, count], lowest bit first."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(-2)[..., :count]
