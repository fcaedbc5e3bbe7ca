"""Sampling from the tokens that top-k, top-p and min-p keep.

`top_k` keeps the tokens of a row with fewer than k tokens above them. Of these `top_p` keeps those where the tokens
above have less than p of the probability of all, and `min_p` those with at least min_p times the largest probability.
"Above" is a larger logit: tokens with the same logit are kept together. The likeliest token is always kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from craton.ml.kernels import elementwise
from craton.ml.kernels.sampling_hash import MIN_TEMPERATURE
from craton.ml.kernels.serving.paged import gumbel


def choose_kept(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    logprob_temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample as `choose` does, with the same noise, from the kept tokens of logits [rows, vocabulary].

    top_k int64 [rows], 0 for all; top_p fp32 [rows], 1 for all; min_p fp32 [rows], 0 for all; None where no row has
    one. At temperature 0 nothing is cut off. `logprob_temperature` is 0 for the log-probability of the model, that of
    softmax(logits), else the temperature, for that of the kept tokens. A row with a NaN, or whose largest logit over
    the temperature is not finite, gives token -1 and log-probability NaN.
    """
    if elementwise.is_fused(logits):
        from craton.ml.kernels.triton import choose_kept as triton_choose_kept

        return triton_choose_kept.choose_kept(
            logits, temperature, seeds, positions, logprob_temperature, top_k, top_p, min_p
        )
    logits = logits.float()
    kept = truncate(logits, temperature, top_k, top_p, min_p)
    hot = temperature >= MIN_TEMPERATURE
    token = torch.where(hot[:, None], kept + gumbel(seeds, positions, logits.shape[1]), logits).argmax(-1)
    is_sampled = hot & (logprob_temperature >= MIN_TEMPERATURE)
    scored = torch.where(is_sampled[:, None], kept, logits)
    logprob = scored.gather(-1, token[:, None]).squeeze(-1) - scored.logsumexp(-1)
    sound = (logits.amax(-1) * _coolness(temperature)).isfinite()  # the maximum of a row with a NaN is NaN
    return torch.where(sound, token, -1), torch.where(sound, logprob, torch.nan)


def truncate(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return logits [rows, vocabulary] over the temperature, in fp32, -inf where a token is not kept.

    Sorts the vocabulary for top_k and top_p. A temperature of 0 counts as 1."""
    logits = logits.float()
    coolness = _coolness(temperature)[:, None]
    scaled = logits * coolness
    top = logits.amax(-1, keepdim=True)
    if top_k is not None or top_p is not None:
        scaled.masked_fill_(logits < _lowest_kept(logits, top, coolness, top_k, top_p), -torch.inf)
    if min_p is not None:
        scaled.masked_fill_((logits - top) * coolness < min_p[:, None].log().clamp(max=0.0), -torch.inf)
    return scaled


def _lowest_kept(logits: Tensor, top: Tensor, coolness: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return the lowest logit [rows, 1] that top_k and top_p keep."""
    ordered, vocabulary = _descending(logits), logits.shape[1]
    lowest = ordered[:, -1:]
    if top_k is not None:
        count = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
        lowest = ordered.gather(-1, count[:, None] - 1)
    if top_p is not None:
        weights = ((ordered - top) * coolness).exp_().masked_fill_(ordered < lowest, 0.0)
        sums, share = weights.cumsum(-1), top_p[:, None]
        count = 1 + ((sums[:, :-1] < share * sums[:, -1:]) | (share >= 1)).sum(-1, keepdim=True)
        lowest = torch.maximum(lowest, ordered.gather(-1, count - 1))
    return lowest


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":  # NumPy's vector sort took a 16th of the time of PyTorch's
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(-1, descending=True).values


def _coolness(temperature: Tensor) -> Tensor:
    """Return 1 / temperature [rows]; 1 for one that is too small to divide by."""
    return 1.0 / torch.where(temperature >= MIN_TEMPERATURE, temperature, 1.0)
