"""Scores of completions: by verifiers and judges in their pool, by a reward model's process, or by a function.

A completion that cannot be scored has None, and the reason is kept in `errors`. Log-probabilities need no scorer: they
come with the samples.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from craton.ml.verifiers import RewardModelProcess, VerifierPool, VerifierSample

Prompt = Any  # as in InferenceRequest: a text, token ids, or messages


class Scorer(Protocol):
    """Scores completions, or the first steps of completions. A larger score is better."""

    @property
    def errors(self) -> Sequence[str]:
        """Why completions got no score."""

    async def score(self, prompt: Prompt, completions: list[str], row: Mapping[str, Any]) -> list[float | None]: ...


class PoolScorer:
    """The weighted sum of a pool's terms (verifiers, functions, judges) or `only` one of them, or the score of a reward
    model."""

    def __init__(self, pool: VerifierPool | RewardModelProcess, only: int | None = None) -> None:
        self._submit = partial(pool.submit, only=only) if isinstance(pool, VerifierPool) else pool.submit
        self.errors: list[str] = []

    async def score(self, prompt: Prompt, completions: list[str], row: Mapping[str, Any]) -> list[float | None]:
        asked = prompt if isinstance(prompt, str) else [dict(item) for item in prompt if isinstance(item, Mapping)]
        samples = [VerifierSample(asked, completion, row) for completion in completions]
        futures = [asyncio.wrap_future(self._submit(sample)) for sample in samples]
        verdicts = await asyncio.gather(*futures)
        self.errors += [verdict.error for verdict in verdicts if verdict.reward is None and verdict.error]
        return [verdict.reward for verdict in verdicts]


class CallableScorer:
    """Scores of a function, called on a thread: (prompt, completions) → one number each."""

    def __init__(self, function: Callable[[Prompt, list[str]], Sequence[float]]) -> None:
        self._function = function
        self.errors: list[str] = []

    async def score(self, prompt: Prompt, completions: list[str], row: Mapping[str, Any]) -> list[float | None]:
        values = list(await asyncio.to_thread(self._function, prompt, completions))
        scores = [float(value) if math.isfinite(value) else None for value in values]
        self.errors += ["the score is not finite" for score in scores if score is None]
        return scores
