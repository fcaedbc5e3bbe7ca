"""What a search over the steps of a completion costs: tokens the engine computes, and time beside another library's.

    python benchmarks/tree_search.py [--its-hub FOLDER | --engine]

`--its-hub`: the folder of `pip install --target FOLDER 'its_hub[lm]==1.2.0'`. The same beam search then runs through
it, through our client, and as a strategy in the server: in turns on one server, over the same problems, each with an
empty prefix cache, and scored by the same verifier. The model is a random one that samples whole words: their tokens
stay the same when a text is tokenized again, as its_hub does at each step.

`--engine`: only the CPU time of these beam searches in an engine of this process, of one thread, to compare commits.

its_hub begins with the branches of one beam, ours with those of all beams. With one beam both do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

import craton
from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.job.sections.strategy import parse_strategy
from craton.ml.data import load_tokenizer
from craton.ml.export import open_model
from craton.ml.serving.clients import EngineClient, InferenceClient, InferenceRequest, connect
from craton.ml.serving.engine import build_engine
from craton.ml.serving.messages import Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.strategies import CallableScorer, Limits, PoolScorer, run_strategy
from craton.ml.verifiers import VerifierPool

TREES = 5
STEP, DEPTH, REPEATS = 16, 8, 5
SHAPES = {"4 branches of 4 beams": (4, 4), "16 branches of 1 beam": (1, 16)}
PROMPT_WORDS = 200
KEY = "empties-the-prefix-cache"
SCORE = {"verifier": "regex", "pattern": "a.*e.*i"}
LOGIT_SCALE = 3.0


def vocabulary() -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 9))) for _ in range(100)]


def problem(number: int) -> str:
    return " ".join(random.Random(number).choices(vocabulary(), k=PROMPT_WORDS))


def random_model(folder: Path) -> None:
    """A small model that ends no text and samples whole words only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from craton.ml.data.chat import ensure_template
    from craton.ml.data.tokenizer import train_bpe

    draw = random.Random(0)
    words = vocabulary()
    train_bpe([" ".join(draw.choices(words, k=200)) + "\n" for _ in range(100)], 1024, folder)
    ensure_template(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    whole = [ids[0] for word in words if len(ids := tokenizer.encode(f" {word}").ids) == 1]
    assert len(whole) > len(words) // 2, "the tokenizer has few whole words"
    with torch.no_grad():  # a logit of another token is 0, far below the largest of the words
        head = torch.zeros_like(model.lm_head.weight)
        head[whole] = torch.randn(len(whole), config.hidden_size) * LOGIT_SCALE
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)


def letters(prompt: Any, completions: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def count_tokens(folder: Path) -> None:
    """Print what the engine computes for trees, beside the tokens that these have."""
    decoder = open_model(str(folder)).model(torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(folder)

    async def grow(engine: Any, step: int) -> int:
        unique = 0
        strategy = {"kind": "tree", "n": 32, "width": 4, "depth": 5, "step": {"tokens": step}, "score": "letters"}
        async with EngineClient(engine, folder) as client:
            for number in range(TREES):
                prompt = f"{number} and {number * 37} make"
                request = InferenceRequest(prompt, Sampling(5 * step, seed=number, ignore_eos=True))
                outcome = await run_strategy(
                    client, request, parse_strategy(strategy), CallableScorer(letters), Limits()
                )
                unique += len(tokenizer.encode(prompt).ids) + outcome.usage.completion_tokens
        return unique

    for page in (16, 4):
        for step in (8, 16, 32):
            engine = build_engine(decoder, EngineSettings(max_length=192, page=page), ())
            unique = asyncio.run(grow(engine, step))
            computed = engine.stats().step_tokens
            print(
                f"tree of 32, 4 branches of {step} tokens a node, blocks of {page}: computed {computed:,}, unique "
                f"{unique:,}: {computed / unique:.3f} (bar: 1.05)"
            )


async def search_in_engine(folder: Path) -> None:
    """Print the CPU time of beam searches, without server and verifiers."""
    torch.set_num_threads(1)
    decoder = open_model(str(folder)).model(torch.device("cpu"), torch.float32)
    for name, (num_beams, width) in SHAPES.items():
        step = {"tokens": STEP}
        strategy = {"kind": "beam", "n": num_beams, "width": width, "depth": DEPTH, "step": step, "score": "letters"}
        seconds = []
        async with EngineClient(build_engine(decoder, EngineSettings(max_length=1024), (), folder), folder) as client:
            for number in range(REPEATS + 2):  # the first one warms up
                chat = [{"role": "user", "content": problem(number)}]
                request = InferenceRequest(chat, Sampling(STEP * DEPTH, seed=number, ignore_eos=True))
                begun = time.process_time()
                await run_strategy(client, request, parse_strategy(strategy), CallableScorer(letters), Limits())
                seconds.append(time.process_time() - begun)
        print(f"{name}: {statistics.median(seconds[1:]):.2f} s of CPU, the fastest {min(seconds[1:]):.2f} s")


class Searches:
    """One beam search in three ways, on one server."""

    def __init__(self, url: str, client: InferenceClient, pool: VerifierPool, shape: tuple[int, int]) -> None:
        self.url, self.client = url, client
        self.num_beams, self.width = shape
        self.scorer = PoolScorer(pool)
        self.strategy = {
            "kind": "beam", "n": self.num_beams, "width": self.width, "depth": DEPTH, "step": {"tokens": STEP},
            "score": "pattern",
        }  # fmt: skip

    async def ours(self, seed: int) -> None:
        chat = [{"role": "user", "content": problem(seed)}]
        request = InferenceRequest(chat, Sampling(STEP * DEPTH, seed=seed, ignore_eos=True))
        await run_strategy(self.client, request, parse_strategy(self.strategy), self.scorer, Limits())

    async def in_the_server(self, seed: int) -> None:
        body = {
            "messages": [{"role": "user", "content": problem(seed)}], "seed": seed, "max_tokens": STEP * DEPTH,
            "ignore_eos": True, "strategy": self.strategy,
        }  # fmt: skip
        async with httpx.AsyncClient(timeout=300) as http:
            (await http.post(f"{self.url}/v1/chat/completions", json=body)).raise_for_status()

    async def its_hub(self, seed: int) -> None:
        from its_hub.api import AbstractProcessRewardModel
        from its_hub.core.algorithms.beam_search import BeamSearch
        from its_hub.core.lms.openai_lm import OpenAICompatibleLanguageModel
        from its_hub.core.lms.step_generation import StepGeneration

        scorer = self.scorer

        class Pattern(AbstractProcessRewardModel):  # type: ignore[misc]
            def score(self, prompt: Any, steps: list[str]) -> list[float]:
                return asyncio.run(self.ascore(prompt, steps))

            async def ascore(self, prompt: Any, steps: list[str]) -> list[float]:
                return [float(score or 0) for score in await scorer.score(prompt, steps, {})]

        lm = OpenAICompatibleLanguageModel(f"{self.url}/v1", "none", str(self.client.model), temperature=1.0)
        steps = StepGeneration(max_steps=DEPTH - 1, tokens_per_step=STEP, temperature=1.0)
        search = BeamSearch(steps, Pattern(), self.num_beams)
        result = await search.ainfer(lm, problem(seed), self.num_beams * self.width, return_response_only=False)
        assert set(result.steps_used) == {DEPTH}
        await lm.close()

    async def empty_cache(self) -> None:
        async with httpx.AsyncClient() as http:
            (
                await http.post(f"{self.url}/reset_prefix_cache", headers={"Authorization": f"Bearer {KEY}"})
            ).raise_for_status()

    async def totals(self) -> tuple[int, int]:
        """Return how many tokens the server has sampled, and how many it has computed."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.url}/metrics")).text
        names = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_sum")
        found = [re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.M) for name in names]  # none before a request
        sampled, computed = (int(sum(map(float, values))) for values in found)
        return sampled, computed


async def race(url: str, pool: VerifierPool) -> None:
    async with await connect(url) as client:
        for name, shape in SHAPES.items():
            searches = Searches(url, client, pool, shape)
            ways = {"our client": searches.ours, "in our server": searches.in_the_server, "its_hub": searches.its_hub}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            tokens: dict[str, tuple[int, int]] = {}
            for number in range(REPEATS + 1):  # the first one warms up
                for way, search in sorted(ways.items(), reverse=bool(number % 2)):
                    await searches.empty_cache()
                    before = await searches.totals()
                    begun = time.monotonic()
                    await search(number)
                    seconds[way].append(time.monotonic() - begun)
                    await asyncio.sleep(1)  # the server publishes its statistics twice a second
                    after = await searches.totals()
                    tokens[way] = after[0] - before[0], after[1] - before[1]
            print(f"beam search, {name}, {DEPTH} steps of {STEP} tokens, medians of {REPEATS}:")
            theirs = statistics.median(seconds["its_hub"][1:])
            for way, times in seconds.items():
                median, (sampled, computed) = statistics.median(times[1:]), tokens[way]
                pairs = [one / other for one, other in zip(times[1:], seconds["its_hub"][1:], strict=True)]
                print(
                    f"  {way}: {median:.2f} s ({median / theirs:.2f} of its_hub, pairs {min(pairs):.2f} to "
                    f"{max(pairs):.2f}), sampled {sampled:,} and computed {computed:,} tokens"
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--its-hub", type=Path)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        random_model(Path(name))
        if options.engine:
            asyncio.run(search_in_engine(Path(name)))
            return
        count_tokens(Path(name))
        if options.its_hub is None:
            return
        sys.path.append(str(options.its_hub))
        os.environ |= {"CRATON_RUNS": f"{name}/runs", "TREE_SEARCH_KEY": KEY}
        server = craton.serve(
            name, precision="fp32", verifiers={"pattern": SCORE}, admin=True, admin_key="TREE_SEARCH_KEY"
        )
        with server, VerifierPool([RewardTerm(**SCORE)], VerifySection()) as pool:
            asyncio.run(race(server.url, pool))


if __name__ == "__main__":
    main()
