"""Times of one step of a replica, from its terms and the constants of an engine.

    step = matmuls + experts + attention + head + collectives + overhead          (seconds on one GPU)
    matmuls = max(weights / weight rate, tokens · multiply / matmul rate)          and alike for experts and the head

With the constants of ROOFLINE every kernel runs at its measured rate and nothing else takes time.

Guarantees: pure functions that broadcast over arrays; more tokens, more context or slower constants never make a step
shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from craton.planning.serving.profile import ENGINE_NAMES
from craton.planning.serving.terms import SHARPNESS, ServingTerms

MANY_TOKENS = 1e9  # that wait for prefill: every step is full
EXPERT_READ_RATE = 0.85  # reading many small experts, of one large matrix
FULL = ("collective_slowdown", "expert_spread", "kv_share")  # collectives at their rate, even routing
ROOFLINE = tuple(float(name.endswith("_rate") or name in FULL) for name in ENGINE_NAMES)


class ServedSteps:
    """Step times of terms (floats, or arrays of one entry per row) under constants in the order of ENGINE_NAMES.
    `factor`: on all times, for what no constant explains."""

    def __init__(self, terms: ServingTerms, constants: Sequence[Any] | Any, factor: Any = 1.0) -> None:
        self.work, self.factor = terms, factor
        self.constants: dict[str, Any] = dict(zip(ENGINE_NAMES, constants, strict=True))
        self.kv_tokens: Any = terms.kv_tokens * self.constants["kv_share"]
        self.step_tokens: Any = terms.step_tokens
        self.prefill_steps: Any = terms.prefill_steps
        self.join_steps: Any = terms.join_steps
        self.max_running: Any = terms.max_running
        self.gpus: Any = terms.gpus
        self.attention_dp: Any = terms.attention_dp

    def scaled(self, factor: Any) -> ServedSteps:
        """Return the same steps with another factor."""
        return ServedSteps(self.work, list(self.constants.values()), factor)

    def terms(
        self, batch: Any, context: Any, tokens: Any = 0.0, prompt: Any = 0.0, *, chunks: Any = 1.0
    ) -> dict[str, Any]:
        """Return the parts of one step. `tokens`: prompt tokens of each attention-data-parallel rank; `chunks`: prompts
        among them that end, and sample a token."""
        t, c = self.work, self.constants
        requests = batch / (t.attention_dp * t.pp)  # of one rank in one pipeline stage
        rows = requests + tokens
        stage_rows = np.maximum(batch / t.pp, 1.0 * (batch > 0)) + tokens * t.attention_dp
        floor = c["kernel_slowdown"]
        packing = np.minimum(np.maximum(rows - t.unpacked_tokens, 0.0), 1.0) * t.packing_seconds
        slowdown = t.row_read_slowdown + (t.read_slowdown - t.row_read_slowdown) * np.clip(rows - 1.0, 0.0, 1.0)
        weights = (t.weights_seconds * slowdown + packing) / c["weight_rate"]
        multiply = rows * t.token_seconds / c["matmul_rate"]
        matmul = _larger(weights, multiply, t.sharpness) + floor * t.matmul_floor_seconds
        expert_rows = stage_rows / t.expert_groups
        met = 1.0 - t.unused_share ** (1.0 + c["expert_spread"] * np.maximum(expert_rows - 1.0, 0.0))
        experts = _larger(
            t.expert_read_seconds * met / (c["weight_rate"] * EXPERT_READ_RATE),
            stage_rows * t.expert_token_seconds / c["expert_rate"],
            t.sharpness,
        )
        experts = experts + floor * t.expert_floor_seconds
        windowed = np.minimum(context, t.window)
        read = requests * (context * t.context_seconds + windowed * t.window_context_seconds)
        attention = np.maximum(read, requests * context * t.context_flops_seconds) / c["kv_rate"]
        attention = attention + floor * t.attention_floor_seconds
        keys = 0.5 * prompt + t.extra_keys
        pairs = keys * t.pair_seconds + np.minimum(keys, t.window + t.extra_keys) * t.window_pair_seconds
        prefill_attention = tokens * pairs / c["prefill_attention_rate"]
        sampled = requests + chunks * (tokens > 0)
        multiplied = sampled * t.head_token_seconds / c["matmul_rate"]
        head = _larger(t.head_seconds / c["weight_rate"], multiplied, t.sharpness)
        moved = t.collective_token_seconds * rows
        parts = {
            "matmul": matmul + rows * t.elementwise_token_seconds,
            "experts": experts,
            "attention": attention,
            "prefill attention": prefill_attention,
            "head": head + sampled * t.sampling_seconds,
            "communication": (t.collective_floor_seconds + moved) * c["collective_slowdown"],
            "overhead": c["step_seconds"]
            + t.layers * c["layer_seconds"]
            + batch * c["request_seconds"] / t.attention_dp,
        }
        return {name: self.factor * part for name, part in parts.items()}

    def decode_seconds(self, batch: Any, context: Any) -> Any:
        """One more token for each of `batch` requests with `context` tokens."""
        return sum(self.terms(batch, context).values())

    def verify_seconds(self, batch: Any, context: Any, length: Any) -> Any:
        """Decode with `length` draft tokens of each request: their rows share its KV cache."""
        return self.decode_seconds(batch * (1.0 + length), context / (1.0 + length))

    def mixed_seconds(self, batch: Any, context: Any, tokens: Any, prompt: Any, *, chunks: Any = 1.0) -> Any:
        """Decode, and prefill of `tokens` of prompts of this length, of which `chunks` end."""
        whole = sum(self.terms(batch, context, tokens, prompt, chunks=chunks).values())
        launching = self.work.launches * self.constants["prefill_layer_seconds"] * (tokens > 0)
        return _larger(whole, self.factor * launching, SHARPNESS)

    def prefill_seconds(self, tokens: Any, context: Any = 0.0) -> Any:
        """The prompt of one request after `context` cached tokens."""
        return self.prompts_seconds(tokens, tokens + 2.0 * context)

    def prompts_seconds(self, tokens: Any, prompt: Any) -> Any:
        """`tokens` of prompts of this length, in full steps."""
        chunk = self.chunk_tokens(tokens)
        return tokens / chunk * self.mixed_seconds(0.0, 0.0, chunk, prompt)

    def least_chunk(self, decoding: Any = 0.0) -> Any:
        """Return the prompt tokens of a step beside `decoding` requests, if as many wait."""
        return least_chunk(self.work.least_tokens, self.work.prefill_steps, decoding)

    def step_budget(self, waiting: Any, decoding: Any = 0.0) -> Any:
        """Return the most prompt tokens of a step, if `waiting` tokens wait."""
        return self.chunk_tokens(np.clip(waiting, self.least_chunk(decoding), MANY_TOKENS), decoding)

    def prefill_chunks(self, prompt: Any, waiting: Any, decoding: Any = 0.0) -> Any:
        """Return the steps from a prompt's first chunk to its last, if `waiting` tokens wait, its own among them."""
        waited = np.minimum(self.work.prefill_steps, waiting / self.least_chunk(decoding))
        return np.maximum(prompt / self.chunk_tokens(prompt, decoding), waited)

    def chunk_tokens(self, waiting: Any, decoding: Any = 0.0) -> Any:
        """Return the mean prompt tokens of the steps that compute all that wait."""
        t = self.work
        return chunk_tokens(waiting, self.least_chunk(decoding), t.step_tokens, t.prefill_steps)


def least_chunk(least_tokens: Any, prefill_steps: Any, decoding: Any) -> Any:
    """Return the prompt tokens of a step beside `decoding` requests, if as many wait: of a scheduler that spreads
    prompts, what they leave of `least_tokens`, or half."""
    rest = np.maximum(least_tokens - decoding, 0.5 * least_tokens)
    return np.where(np.asarray(prefill_steps) > 1.0, rest, least_tokens)


def chunk_tokens(waiting: Any, least_chunk: Any, step_tokens: Any, prefill_steps: Any) -> Any:
    """Return the mean prompt tokens of the steps that compute all that wait. A step computes a share of those left,
    1 / prefill_steps, but at least `least_chunk` and at most `step_tokens`."""
    spread_from, spread_to = prefill_steps * least_chunk, prefill_steps * step_tokens
    full = np.maximum(waiting - spread_to, 0.0) / step_tokens
    left = np.maximum(1.0 - 1.0 / prefill_steps, 1e-300)  # after a step, of those that waited
    spread = np.log(np.clip(waiting, spread_from, spread_to) / spread_from) / -np.log(left)
    last = np.minimum(waiting, spread_from) / least_chunk
    return waiting / np.maximum(full + spread + last, 1.0)


def slowed_prefill_seconds(decode: Any, mixed: Any, slowdown: Any) -> Any:
    """Return a step with prompts whose prefill takes `slowdown` times as long beside decode."""
    return decode + np.maximum(mixed - decode, 0.0) * slowdown


def _larger(one: Any, other: Any, sharpness: Any) -> Any:
    """A smooth maximum."""
    return (one**sharpness + other**sharpness) ** (1.0 / sharpness)
