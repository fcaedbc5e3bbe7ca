"""What test-time compute buys on the lifecycle's arithmetic model.

    python benchmarks/strategies.py RUN_OR_FOLDER DATA/test.jsonl

RUN_OR_FOLDER: the lifecycle's SFT model. `--only`: votes, best_of or budgets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from math import comb
from pathlib import Path
from typing import Any

import torch

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.job.sections.strategy import parse_strategy
from craton.ml.data import end_of_document, end_of_turn, load_tokenizer
from craton.ml.export import open_model
from craton.ml.serving.clients import EngineClient, InferenceRequest, complete_all
from craton.ml.serving.engine import build_engine
from craton.ml.serving.messages import Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.strategies import Limits, PoolScorer, StrategyOutcome, run_strategy
from craton.ml.verifiers import VerifierPool

PROBLEMS = 500
VOTES = 16
PREDICTION_SAMPLES = 32
MAX_TOKENS = 6
SEED_STRIDE = 1000
AT_ONCE = 16


class Bench:
    def __init__(self, model: str, rows: list[dict[str, Any]]) -> None:
        self.model, self.rows = model, rows
        opened = open_model(model)
        self.folder = opened.tokenizer_folder()
        ends = {end_of_document(self.folder, load_tokenizer(self.folder)), end_of_turn(self.folder)} - {None}
        self.ends = [end for end in ends if end is not None]
        self.decoder: Any = opened.model(torch.device("cpu"), torch.float32)

    def engine(self, **settings: Any) -> Any:
        return build_engine(self.decoder, EngineSettings(max_length=192, **settings), self.ends)

    def with_client(self, work: Callable[[EngineClient], Awaitable[Any]], engine: Any = None) -> Any:
        async def inside() -> Any:
            async with EngineClient(engine or self.engine(), self.folder) as client:
                return await work(client)

        return asyncio.run(inside())

    async def run_all(
        self, client: EngineClient, strategy: object, scorer: Any = None, rows: Sequence[dict[str, Any]] | None = None
    ) -> list[StrategyOutcome]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, row: dict[str, Any]) -> StrategyOutcome:
            request = InferenceRequest(row["prompt"], Sampling(MAX_TOKENS, seed=number * SEED_STRIDE))
            async with slots:
                return await run_strategy(client, request, parse_strategy(strategy), scorer, Limits(), row=row)

        return list(await asyncio.gather(*(one(*item) for item in enumerate(rows or self.rows))))

    def right(self, outcomes: Sequence[StrategyOutcome]) -> float:
        right = [o.text == row["answer"] for o, row in zip(outcomes, self.rows, strict=True)]
        return sum(right) / len(right)

    # -- parts ------------------------------------------------------------------------------------------------------

    def votes(self) -> None:
        vote = {"kind": "vote", "n": VOTES, "answer": "text"}
        full, early = (
            self.with_client(lambda client, stop=stop: self.run_all(client, vote | {"stop": stop}))
            for stop in ("off", 0.88)
        )
        for one, two in zip(full, early, strict=True):
            assert [s.text for s in two.samples] == [s.text for s in one.samples][: len(two.samples)]
        sampled = statistics.mean(
            s.text == row["answer"] for o, row in zip(full, self.rows, strict=True) for s in o.samples
        )
        tokens = [sum(o.usage.completion_tokens for o in outcomes) for outcomes in (full, early)]
        means = [statistics.mean(len(o.samples) for o in outcomes) for outcomes in (full, early)]
        print(f"{len(self.rows)} sums, one sample right: {sampled:.1%}")
        print(f"full vote of {VOTES}: {self.right(full):.1%}, {tokens[0]:,} tokens")
        print(f"early stop at 0.88: {self.right(early):.1%}, {tokens[1]:,} tokens, {means[1]:.1f} samples")
        print(
            f"  difference {100 * (self.right(early) - self.right(full)):+.1f} points (bar: within 1), "
            f"{tokens[1] / tokens[0]:.0%} of the tokens (bar: 50%)"
        )

    def best_of(self) -> None:
        async def sample(client: EngineClient) -> list[int]:
            requests = [
                InferenceRequest(
                    row["prompt"], Sampling(MAX_TOKENS, seed=10**9 + number * SEED_STRIDE), copies=PREDICTION_SAMPLES
                )
                for number, row in enumerate(self.rows)
            ]
            found = await complete_all(client, requests)
            return [sum(a.text == row["answer"] for a in c) for c, row in zip(found, self.rows, strict=True)]

        counts = self.with_client(sample)
        with VerifierPool([RewardTerm(verifier="exact")], VerifySection()) as pool:
            for n in (1, 2, 4, 8, 16):
                strategy = {"kind": "best_of", "n": n, "score": "exact"}
                outcomes = self.with_client(lambda client, s=strategy: self.run_all(client, s, PoolScorer(pool)))
                predicted, half = pass_at(counts, PREDICTION_SAMPLES, n)
                measured = self.right(outcomes)
                verdict = "within" if abs(measured - predicted) <= half else "OUTSIDE"
                print(
                    f"best of {n}: {measured:.1%} right; pass@{n} predicted {predicted:.1%} ± {half:.1%} from "
                    f"{PREDICTION_SAMPLES} other samples: {verdict}"
                )

    def budgets(self) -> None:
        async def force(client: EngineClient) -> list[int]:
            counts = []
            for budget in (5, 20, 60):
                strategy = parse_strategy({"kind": "budget", "at_least": budget, "at_most": budget, "close": "="})
                for number, row in enumerate(self.rows[:50]):
                    request = InferenceRequest(row["prompt"], Sampling(100, seed=number))
                    outcome = await run_strategy(client, request, strategy, None, Limits())
                    counts.append(outcome.report["thinking_tokens"] - budget)
            return counts

        counts = self.with_client(force)
        print(f"budget forcing: {counts.count(0)} of {len(counts)} chains of thought have exactly their budget")


def pass_at(counts: Sequence[int], samples: int, n: int) -> tuple[float, float]:
    """Return the unbiased pass@n, and 1.96 standard deviations of a measurement with other samples of the same
    problems: of its own n samples, and of the prediction."""
    chances = [1 - comb(samples - count, n) / comb(samples, n) for count in counts]
    shares = [count / samples for count in counts]
    measured = sum(chance * (1 - chance) for chance in chances)
    predicted = sum((n * (1 - share) ** (n - 1)) ** 2 * share * (1 - share) / samples for share in shares)
    return statistics.mean(chances), 1.96 * math.sqrt(measured + predicted) / len(counts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", nargs="*", default=["votes", "best_of", "budgets"])
    options = parser.parse_args()
    lines = options.rows.read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    bench = Bench(options.model, [json.loads(line) for line in lines])
    for part in options.only:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
