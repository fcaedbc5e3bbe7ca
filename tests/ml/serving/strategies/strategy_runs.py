"""Runs of strategies on a real engine, after which nothing may be left in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from waiting import PATIENCE_SECONDS

from craton.job.sections.strategy import parse_strategy
from craton.ml.serving.clients import EngineClient, InferenceRequest
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling
from craton.ml.serving.strategies import Limits, StrategyOutcome, run_strategy

Result = TypeVar("Result")


class FunctionScorer:
    """Scores by a function of the text; None is no score."""

    def __init__(self, function: Callable[[str], float | None]) -> None:
        self._function = function
        self.errors = ["nonsense"]

    async def score(self, prompt: Any, completions: list[str], row: Mapping[str, Any]) -> list[float | None]:
        return [self._function(text) for text in completions]


@dataclass
class Strategies:
    """Runs strategies on one engine; afterwards nothing is left in it."""

    engine: Engine
    folder: Path

    def with_client(self, work: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        async def inside() -> Result:
            async with asyncio.timeout(PATIENCE_SECONDS), EngineClient(self.engine, self.folder) as client:
                result = await work(client)
                assert client.num_in_flight == 0, "no answer is left open"
                return result

        result = asyncio.run(inside())
        self.engine.check()
        assert self.engine.is_idle
        return result

    def run(
        self,
        strategy: object,
        scorer: Callable[[str], float | None] | None = None,
        limits: Limits | None = None,
        prompt: Any = "The quick brown",
        max_tokens: int = 16,
        **sampling: Any,
    ) -> StrategyOutcome:
        request = InferenceRequest(prompt, replace(Sampling(max_tokens=max_tokens, seed=3), **sampling))

        async def work(client: EngineClient) -> StrategyOutcome:
            used = FunctionScorer(scorer) if scorer is not None else None
            return await run_strategy(client, request, parse_strategy(strategy), used, limits or Limits())

        return self.with_client(work)


def texts_of(outcome: StrategyOutcome) -> Sequence[str]:
    return [sample.text for sample in outcome.samples]
