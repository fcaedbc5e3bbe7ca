"""What test-time compute buys on the lifecycle's arithmetic model, and what a search costs the engine.

    python benchmarks/strategies.py RUN_OR_FOLDER DATA/test.jsonl [--its-hub FOLDER]

RUN_OR_FOLDER: the lifecycle's SFT model. `--its-hub`: the folder of `pip install --target FOLDER its_hub`; the same
beam search then runs through it, on the same server. `--only`: votes, best_of, budgets, trees or its_hub.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from math import comb
from pathlib import Path
from typing import Any

import torch

import craton
from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.job.sections.strategy import parse_strategy
from craton.ml.data import end_of_document, end_of_turn, load_tokenizer
from craton.ml.export import open_model
from craton.ml.serving.clients import EngineClient, InferenceRequest, complete_all, connect
from craton.ml.serving.engine import build_engine
from craton.ml.serving.messages import Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.strategies import CallableScorer, Limits, PoolScorer, StrategyOutcome, run_strategy
from craton.ml.verifiers import VerifierPool

PROBLEMS = 500
VOTES = 16
PREDICTION_SAMPLES = 32
MAX_TOKENS = 6
SEED_STRIDE = 1000
AT_ONCE = 16
SEARCH = {"kind": "beam", "n": 4, "width": 4, "depth": 8, "step": {"tokens": 16}, "score": "letters"}
REPEATS = 5


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

    def trees(self) -> None:
        scorer = CallableScorer(letters)
        for page in (16, 4):
            for step in (8, 16, 32):
                strategy = parse_strategy(
                    {"kind": "tree", "n": 32, "width": 4, "depth": 5, "step": {"tokens": step}, "score": "letters"}
                )
                unique = 0
                engine = self.engine(page=page)
                for number, row in enumerate(self.rows[:5]):
                    sampling = Sampling(5 * step, seed=number, ignore_eos=True)
                    request = InferenceRequest(row["prompt"], sampling)
                    outcome = self.with_client(
                        lambda client, r=request, s=strategy: run_strategy(client, r, s, scorer, Limits()), engine
                    )
                    unique += len(load_tokenizer(self.folder).encode(row["prompt"]).ids)
                    unique += outcome.usage.completion_tokens
                computed = engine.stats().step_tokens
                print(
                    f"tree of 32, 4 branches of {step} tokens a node, blocks of {page}: computed {computed:,}, unique "
                    f"{unique:,}: {computed / unique:.3f} (bar: 1.05)"
                )


def pass_at(counts: Sequence[int], samples: int, n: int) -> tuple[float, float]:
    """Return the unbiased pass@n, and 1.96 standard deviations of a measurement with other samples of the same
    problems: of its own n samples, and of the prediction."""
    chances = [1 - comb(samples - count, n) / comb(samples, n) for count in counts]
    shares = [count / samples for count in counts]
    measured = sum(chance * (1 - chance) for chance in chances)
    predicted = sum((n * (1 - share) ** (n - 1)) ** 2 * share * (1 - share) / samples for share in shares)
    return statistics.mean(chances), 1.96 * math.sqrt(measured + predicted) / len(counts)


def letters(prompt: Any, completions: Sequence[str]) -> list[float]:
    """A score that costs nothing: the same for both searches."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def random_model(folder: Path) -> None:
    """A small model that ends no text: both searches sample steps of the same length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from craton.ml.data.chat import ensure_template
    from craton.ml.data.tokenizer import train_bpe

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 9))) for _ in range(2000)]
    train_bpe([" ".join(draw.choices(words, k=200)) + "\n" for _ in range(20)], 512, folder)
    ensure_template(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=load_tokenizer(folder).get_vocab_size(), max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def compare_searches(its_hub: str) -> None:
    """Run the same beam search through our strategy and through its_hub, in turns, on one server."""
    sys.path.append(its_hub)
    from its_hub.api import AbstractProcessRewardModel
    from its_hub.core.algorithms.beam_search import BeamSearch
    from its_hub.core.lms.openai_lm import OpenAICompatibleLanguageModel
    from its_hub.core.lms.step_generation import StepGeneration

    class Letters(AbstractProcessRewardModel):  # type: ignore[misc]
        def score(self, prompt: Any, steps: list[str]) -> list[float]:
            return letters(prompt, steps)

        async def ascore(self, prompt: Any, steps: list[str]) -> list[float]:
            return letters(prompt, steps)

    tokens, depth = SEARCH["step"]["tokens"], SEARCH["depth"]  # type: ignore[index]
    prompt = "Once upon a time " * 20

    async def both(url: str) -> list[tuple[float, float]]:
        chat = [{"role": "user", "content": prompt}]
        pairs = []
        async with await connect(url) as client:
            for number in range(REPEATS + 1):
                sampling = Sampling(tokens * depth, seed=number, ignore_eos=True)
                request = InferenceRequest(chat, sampling)
                begun = time.monotonic()
                outcome = await run_strategy(client, request, parse_strategy(SEARCH), CallableScorer(letters), Limits())
                ours = time.monotonic() - begun
                assert outcome.usage.completion_tokens == 16 * tokens * depth
                lm = OpenAICompatibleLanguageModel(f"{url}/v1", "none", str(client.model), temperature=1.0)
                steps = StepGeneration(max_steps=depth - 1, tokens_per_step=tokens, temperature=1.0)
                begun = time.monotonic()
                result = await BeamSearch(steps, Letters(), 4).ainfer(lm, prompt, 16, return_response_only=False)
                theirs = time.monotonic() - begun
                assert set(result.steps_used) == {depth}
                await lm.close()
                pairs.append((ours, theirs))
        return pairs[1:]  # the first fills caches

    with tempfile.TemporaryDirectory() as name:
        random_model(Path(name))
        with craton.serve(name, "strategies-search", precision="fp32") as server:
            pairs = asyncio.run(both(server.url))
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"beam of 4 with 4 expansions, {depth} steps of {tokens} tokens, medians of {REPEATS}:")
    print(f"  ours {ours:.2f} s, its_hub {theirs:.2f} s: {ours / theirs:.2f} (bar: 0.7)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--its-hub")
    parser.add_argument("--only", nargs="*", default=["votes", "best_of", "budgets", "trees", "its_hub"])
    options = parser.parse_args()
    lines = options.rows.read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    bench = Bench(options.model, [json.loads(line) for line in lines])
    for part in options.only:
        if part != "its_hub":
            getattr(bench, part)()
    if options.its_hub and "its_hub" in options.only:
        compare_searches(options.its_hub)


if __name__ == "__main__":
    main()
