"""Samples of the policy: a prompt, what was generated for it, and its verdict. Plain data, sent between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.ml.data import Prompt
from craton.ml.posttraining.rows import TrainedSequence
from craton.ml.verifiers import Verdict


@dataclass
class RolloutSample:
    """One completion of a prompt; with an environment, several turns of it."""

    prompt: Prompt
    copy: int
    tokens: list[int]  # the prompt, then what was generated and what an environment wrote
    prompt_length: int
    is_generated: list[bool]  # by token after the prompt
    logprobs: list[float]  # by token after the prompt, of the distribution that was sampled; 0 if it was not
    versions: list[int]  # by generated token, of the weights
    completion: str = ""  # text of the last turn
    transcript: list[dict[str, Any]] = field(default_factory=list)  # of an environment: role and content
    is_truncated: bool = False
    seconds: float = 0.0  # from the beginning of the step's generation to its last token
    verdict: Verdict | None = None

    @property
    def num_generated(self) -> int:
        return sum(self.is_generated)

    @property
    def reward(self) -> float:
        """NaN: no verdict."""
        reward = self.verdict.reward if self.verdict is not None else None
        return math.nan if reward is None else reward

    def sequence(self, is_trained: bool) -> TrainedSequence:
        """Return the sequence to train on, with a weight on generated tokens."""
        before = np.zeros(self.prompt_length - 1, np.float32)  # entry t is about token t + 1
        weight = np.concatenate((before, np.array(self.is_generated, np.float32) * is_trained))
        logprobs = np.concatenate((before, np.array(self.logprobs, np.float32)))
        return TrainedSequence(np.array(self.tokens, np.int64), weight, {"rollout_logprob": logprobs})


@dataclass(frozen=True)
class StepSamples:
    """All samples of a step, the same on every rank: in the order of prompts, then of copies."""

    samples: list[RolloutSample]
    group: int
    next_prompt: int  # the first prompt of the next step
    phase_seconds: dict[str, float]
    metrics: dict[str, float]
    warning: str = ""  # about samples without a verdict

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[prompts, group]; NaN: no verdict."""
        return np.array([sample.reward for sample in self.samples]).reshape(-1, self.group)


def has_unequal_rewards(group: Sequence[RolloutSample]) -> bool:
    """Whether a group has something to learn from: two verdicts that differ."""
    rewards = [sample.reward for sample in group if not math.isnan(sample.reward)]
    return len(rewards) > 1 and max(rewards) > min(rewards)
