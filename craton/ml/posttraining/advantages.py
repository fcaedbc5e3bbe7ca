"""Advantages of sampled completions over a baseline: pure numpy.

A reward of NaN is no verdict: its sample is in no baseline and gets advantage 0, and weight 0 in the loss
(`has_verdict`). With fewer than two verdicts there is nothing to compare, and all advantages of the group are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from craton.job.sections.posttraining import PolicyLoss

Floats = NDArray[np.float64]

STD_FLOOR = 1e-4  # added to standard deviations, as in TRL: rewards that hardly differ are not blown up


def has_verdict(rewards: Floats) -> NDArray[np.bool_]:
    """Whether each sample has a verdict."""
    return ~np.isnan(rewards)


def completion_advantages(rewards: Floats, loss: PolicyLoss) -> Floats:
    """rewards [prompts, group] → advantages of the same shape, one per completion. Not for ppo, whose advantages are
    per token (`generalized_advantages`), nor for distill, which has no rewards."""
    if loss in ("ppo", "distill"):
        raise ValueError(f"loss {loss} has no advantages per completion")
    known = has_verdict(rewards)
    verdicts = np.where(known, rewards, 0.0)
    if loss == "reinforce++":  # one group of all samples
        centered, deviation = _centered(verdicts.reshape(1, -1), known.reshape(1, -1))
        return (centered / (deviation + STD_FLOOR)).reshape(rewards.shape)
    if loss == "rloo":  # the baseline of a sample is the mean of the others
        counts = known.sum(axis=1, keepdims=True)
        others = (verdicts.sum(axis=1, keepdims=True) - verdicts) / np.maximum(counts - 1, 1)
        return np.where(known & (counts > 1), verdicts - others, 0.0)
    centered, deviation = _centered(verdicts, known)
    return centered if loss == "dr_grpo" else centered / (deviation + STD_FLOOR)


def generalized_advantages(
    rewards: Floats, values: Floats, discount: float, decay: float, last_value: float = 0.0
) -> tuple[Floats, Floats]:
    """Generalized advantage estimation (arXiv:1506.02438) over the generated tokens of one completion: (advantages,
    returns). `last_value` is the value after the last token, 0 at the end of an episode."""
    found = np.zeros(len(rewards))
    following, next_value = 0.0, last_value
    for token in range(len(rewards) - 1, -1, -1):
        error = rewards[token] + discount * next_value - values[token]
        following = found[token] = error + discount * decay * following
        next_value = values[token]
    return found, found + values


def whiten(values: Floats, weight: Floats) -> Floats:
    """Mean 0 and standard deviation 1 over the samples with weight; 0 elsewhere."""
    centered, deviation = _centered(values.reshape(1, -1), (weight != 0).reshape(1, -1))
    return (centered / (deviation + STD_FLOOR)).reshape(values.shape)


def _centered(values: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """(difference from the mean of each row's known values, their standard deviation); exactly 0 if they are equal or
    fewer than two."""
    counts = known.sum(axis=1, keepdims=True)
    highest = np.where(known, values, -np.inf).max(axis=1, keepdims=True)
    differ = highest > np.where(known, values, np.inf).min(axis=1, keepdims=True)
    mean = np.where(known, values, 0.0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    centered = np.where(known & differ, values - mean, 0.0)
    deviation = np.sqrt(np.square(centered).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
    return centered, deviation
