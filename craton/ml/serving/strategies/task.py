"""What the strategies share: the request, its scorer, the running samples, and the outcome made of them."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from craton.ml.serving.clients import Answer, InferenceClient, InferenceRequest
from craton.ml.serving.messages import SEEDS, Sampling
from craton.ml.serving.strategies.errors import NoScoreError
from craton.ml.serving.strategies.limits import Limits
from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategyProgress, StrategySample, StrategyUsage
from craton.ml.serving.strategies.samples import RunningSamples, completion_length
from craton.ml.serving.strategies.scorers import Scorer

MAX_SEED = 1 << 53  # seeds are whole numbers in JSON, too


@dataclass
class StrategyTask:
    """One strategy at work. `asked` is the request as its owner wrote it, which scorers see; `request` is the one that
    is sent, with token ids where the endpoint takes them."""

    kind: str
    client: InferenceClient
    asked: InferenceRequest
    request: InferenceRequest
    limits: Limits
    running: RunningSamples
    scorer: Scorer | None = None  # None: log-probabilities, where the strategy has a score
    row: Mapping[str, Any] = field(default_factory=dict)
    on_progress: Callable[[StrategyProgress], None] | None = None
    num_samples: int = 1  # maximum

    def seeded(self, index: int) -> Sampling:
        """Return the sampling of sample `index`: seed + index, as copies of a request have it."""
        sampling = self.request.sampling
        return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % SEEDS)

    def path_seed(self, path: Sequence[int]) -> int | None:
        """Return the seed of the branches behind a path of a search: it depends on the request's seed and the path."""
        seed = self.request.sampling.seed
        if seed is None or not path:
            return seed
        digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % (MAX_SEED - len(path) - 1024)

    def tell(self, note: str = "") -> None:
        if self.on_progress is not None:
            tokens = self.limits.completion_tokens
            self.on_progress(StrategyProgress(self.kind, self.running.num_ended, self.num_samples, tokens, note))

    async def scores(self, completions: list[str]) -> list[float | None]:
        """Return a scorer's scores; None for what it cannot score, and for all where the time is over before."""
        assert self.scorer is not None
        work = self.scorer.score(self.asked.prompt, completions, self.row)
        found = await self.running.before_deadline(work)
        return list(found) if found is not None else [None] * len(completions)

    def outcome(
        self,
        chosen: StrategySample,
        samples: list[StrategySample],
        report: dict[str, Any],
        reasoning: str | None = None,
        chosen_tokens: int | None = None,
    ) -> StrategyOutcome:
        assert chosen.answer is not None
        limits = self.limits
        chosen_tokens = chosen.num_tokens if chosen_tokens is None else chosen_tokens
        completion_tokens = max(limits.completion_tokens, chosen_tokens)
        usage = StrategyUsage(
            limits.prompt_tokens,
            completion_tokens,
            chosen_tokens,
            completion_tokens - chosen_tokens,
            self.running.num_ended,
        )
        finish = "length" if chosen.finish == "abort" else chosen.finish
        return StrategyOutcome(
            chosen.text,
            chosen.tokens,
            finish,
            chosen.answer,
            samples,
            usage,
            self.running.limited_by,
            {"kind": self.kind, **report},
            reasoning,
            dollars=limits.spent_dollars,
        )

    def nothing(self) -> StrategySample:
        """Return the empty sample of a limit that let none start."""
        answer = Answer(self.request)
        answer.finish = "length"
        return StrategySample(0, "", finish="length", answer=answer)


def reached(samples: Sequence[StrategySample]) -> StrategySample | None:
    """Return what a limit left: the first sample that has ended, or else the longest."""
    return max(samples, key=lambda sample: math.inf if sample.finish != "abort" else sample.num_tokens, default=None)


def sample_of(answer: Answer, index: int) -> StrategySample:
    return StrategySample(
        index, answer.text, tuple(answer.tokens), completion_length(answer), answer.finish, answer=answer
    )


def mean_logprob(logprobs: Sequence[float]) -> float | None:
    """Return the score `logprobs`; None without tokens."""
    return sum(logprobs) / len(logprobs) if logprobs else None


def expect_scores(scorer: Scorer | None, num_samples: int, scores: Sequence[float | None], is_limited: bool) -> None:
    """Raise NoScoreError if samples were to be scored and none has a score, unless a limit is the reason."""
    if not num_samples or is_limited or any(score is not None for score in scores):
        return
    errors = list(dict.fromkeys(scorer.errors))[:3] if scorer is not None else ["no log-probabilities came"]
    reason = "; ".join(errors) or "no reason given"
    raise NoScoreError(f"none of {num_samples} samples got a score; first errors: {reason}")


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
