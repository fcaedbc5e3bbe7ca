"""Tokens, KV cache and rounds of a strategy on one problem, from the lengths of a prompt and of one completion.

Samples of a problem share its prompt in the KV cache. Guarantees: pure functions; more samples never need fewer tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from craton.job.sections.strategy import LOGPROBS
from craton.planning.setting import PlanError

BYTES_PER_TOKEN = 3  # of a text without its tokenizer: an estimate that is rather too high
STEPS_OF_COMPLETION = 8  # of a search whose steps end at a text: assumed, as a share of a completion


@dataclass(frozen=True)
class SampleLengths:
    """Mean tokens of a prompt and of one completion."""

    prompt_tokens: float
    completion_tokens: float


@dataclass(frozen=True)
class StrategyShape:
    """What of a strategy decides its tokens. `n`: samples, beams, or expansions of a tree in total."""

    kind: str  # sample, best_of, vote, beam, tree or budget
    n: int = 1
    stop: float = 0.0  # of a vote; 0: a full vote
    score: str = ""  # of a best of n or a search: logprobs, or the name of a verifier; empty: a verifier always right
    width: int = 1
    depth: int = 1
    step_tokens: int = 0  # 0: a share of a completion
    at_least: int = 0
    at_most: int = 0  # 0: no limit

    @property
    def name(self) -> str:
        """The strategy in one word, without n."""
        if self.kind == "vote":
            return f"vote, stop {self.stop:g}" if self.stop else "full vote"
        if self.kind == "best_of":
            return f"best of n, {self.score}" if self.score else "best of n"
        if self.kind == "budget":
            most = self.at_most or "any"
            return f"budget, {self.at_least}–{most}" if self.at_least else f"budget, at most {most}"
        if self.kind in ("beam", "tree"):
            return f"{self.kind}, width {self.width}"
        return "one sample"

    @property
    def needs_truth(self) -> bool:
        """Whether its prediction needs a verifier that knows the right answer."""
        return self.kind == "best_of" and self.score != LOGPROBS


@dataclass(frozen=True)
class PlannedUsage:
    """What a strategy uses on one problem, on average."""

    prompt_tokens: float
    completion_tokens: float  # of all samples, chosen and discarded
    num_requests: float  # each has the prompt, if no KV cache is shared
    kv_tokens: float  # at the end, with the shared prompt counted once
    parallel: float  # requests at the same time
    rounds_tokens: float  # of the longest chain of completions that wait for each other
    branch_tokens: float  # of one completion, at its end

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.completion_tokens


def strategy_usage(
    shape: StrategyShape, lengths: SampleLengths, mean_votes: float = 0.0, rounds: float = 1.0
) -> PlannedUsage:
    """Return the usage of a strategy; `mean_votes` and `rounds`: of a vote that ends early."""
    prompt, completion = lengths.prompt_tokens, lengths.completion_tokens
    if shape.kind in ("sample", "best_of", "vote"):
        samples = mean_votes or float(shape.n)
        parallel = samples / rounds
        kv_tokens = prompt + parallel * completion
        return PlannedUsage(prompt, samples * completion, samples, kv_tokens, parallel, rounds * completion, completion)
    if shape.kind == "budget":
        thought = max(completion, float(shape.at_least))
        thought = min(thought, float(shape.at_most)) if shape.at_most else thought
        return PlannedUsage(prompt, thought, 1.0, prompt + thought, 1.0, thought, thought)
    step = shape.step_tokens or completion / STEPS_OF_COMPLETION
    levels = max(1, min(shape.depth, math.ceil(completion / step)))
    if shape.kind == "beam":
        branches = float(shape.n * shape.width)
        kept = prompt + shape.n * (levels - 1) * step
        used = branches * step * levels
        kv_tokens = kept + branches * step
        return PlannedUsage(prompt, used, branches * levels, kv_tokens, branches, levels * step, levels * step)
    if shape.kind == "tree":
        parallel = float(min(shape.n, shape.width))
        used, chain = shape.n * step, math.ceil(shape.n / parallel) * step
        return PlannedUsage(prompt, used, float(shape.n), prompt + used, parallel, chain, min(levels, shape.n) * step)
    raise PlanError(f"strategy {shape.kind!r} is not planned; allowed: sample, best_of, vote, beam, tree, budget")
