"""Means of a closed loop: a fixed number of requests in flight, the next one starts when one ends.

    C = (TTFT + (output - 1) · TPOT) · throughput                                       Little's law
    TPOT = decode(B) + (B - 1) / output · (added time of one prompt's prefill)           B: requests in decode
    TTFT = fixed + steps until it joins + its prefill, or what Little's law leaves if prefill is the bottleneck
    TTFT of the start burst = mean wait of C prefills that start at once

Requests that start together end together if outputs have one length, so a wave's prompts share steps: the chunk is that
of WAVE_SHARE of a wave. Where every step has prompts, the chunk is what arrives during a step. Requests beyond the KV
cache wait. Pure functions of step times; arguments broadcast. tests/planning/test_spread_prefill.py compares with a
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from craton.planning.serving.step_times import ServedSteps, slowed_prefill_seconds

ROUNDS = 20  # of the fixed point
# Share of a wave that waits together, with outputs of one length. A simulated scheduler whose users answer at once
# keeps 0.3 to 0.5 together; measurements of our server, whose clients and HTTP spread the requests, fit 0.05 to 0.2.
WAVE_SHARE = 0.12
BOTTLENECK_SHARPNESS = 20.0  # of the maximum of a request's own time and that of all prefills


@dataclass(frozen=True)
class ClosedLoad:
    """Seconds are means over requests; `decoding` requests are in decode, `running` at most fit."""

    tpot_seconds: Any
    steady_ttft_seconds: Any
    burst_ttft_seconds: Any  # of the requests that start together
    requests_per_second: Any  # of the replica
    decoding: Any
    running: Any
    concurrency: Any

    def mean_ttft_seconds(self, burst_share: Any) -> Any:
        """`burst_share`: of the requests, that start together: concurrency / number of requests."""
        return (1.0 - burst_share) * self.steady_ttft_seconds + burst_share * self.burst_ttft_seconds

    def mean_requests_per_second(self, burst_share: Any) -> Any:
        """Return the throughput of a benchmark: by Little's law, its first requests take longer."""
        longer = burst_share * (self.burst_ttft_seconds - self.steady_ttft_seconds)
        return self.concurrency / (self.concurrency / self.requests_per_second + longer)


def closed_loop(
    steps: ServedSteps,
    concurrency: Any,
    prompt: Any,
    output: Any,
    *,
    first_token_seconds: Any = 0.0,
    prefill_slowdown: Any = 1.0,
    attention_dp: Any = 1.0,
    balance_steps: Any = 0.0,
    cached: Any = 0.0,
    waves: Any = 1.0,
) -> ClosedLoad:
    """Return the means of a replica that serves prefill and decode together; `concurrency` is the replica's, `cached`
    the tokens of each prompt that the prefix cache has. `waves`: 1 where outputs have one length, as in benchmarks, 0
    where they differ so much that users do not stay together."""
    output = np.maximum(output, 1.0)
    waves = waves * (steps.prefill_steps > 1.0)  # measurements of other engines fit prompts at random times
    context = prompt + 0.5 * output
    fitting = np.maximum(np.minimum(steps.max_running, steps.kv_tokens / context), 1.0)
    running = np.minimum(concurrency, fitting)
    computed = np.maximum(prompt - cached, 1.0)
    attended = computed + 2.0 * cached  # the length of a prompt whose queries see as many keys
    ranked = np.maximum(running / attention_dp, 1.0)  # requests of a rank
    wave = ranked * computed  # prompt tokens
    largest = steps.chunk_tokens(wave, running)
    decoding, others = running, 1.0 - 1.0 / np.maximum(running, 1.0)
    slowdown = 1.0 + (prefill_slowdown - 1.0) * others  # of prefill beside decode
    tpot = step = steps.decode_seconds(running, context)
    life = output * tpot
    together = waves * np.maximum(WAVE_SHARE * ranked, 1.0) + (1.0 - waves)
    for _ in range(ROUNDS):
        decode = steps.decode_seconds(decoding, context)
        arriving = np.minimum(computed * running / life * step / attention_dp, steps.step_tokens)
        chunk = np.maximum(steps.chunk_tokens(computed * together, decoding), arriving)
        # Prompts queue up until a step computes as many tokens as arrive, where that is more than its least chunk.
        queued = steps.prefill_steps * arriving * np.minimum(arriving / steps.least_chunk(decoding), 1.0) ** 2
        waiting = waves * wave + (1.0 - waves) * np.maximum(computed, queued)
        chunks, own_chunks = computed / chunk, steps.prefill_chunks(computed, waiting, decoding)
        mixed = slowed_prefill_seconds(decode, steps.mixed_seconds(decoding, context, chunk, attended), slowdown)
        rate = running / life
        parallel = np.minimum(attention_dp, 1.0 + rate * chunks * mixed)  # ranks whose prefills share a step
        busy = np.minimum(rate * chunks * mixed / parallel, 1.0)
        prefilling = rate * chunks / parallel  # steps with prompts in a second
        share = prefilling / (prefilling + (1.0 - busy) / decode) * others
        met = np.maximum(decoding - 1.0, 0.0) / output * chunks / parallel  # by each token of a request
        tpot = 0.5 * (tpot + decode + np.clip(met, share, 1.0) * (mixed - decode))
        step = decode + busy * (mixed - decode)
        joining = (steps.join_steps * step + balance_steps * (attention_dp > 1.0) * tpot) * (decoding > 1.0)
        own = first_token_seconds + joining + own_chunks * mixed + (output - 1.0) * tpot
        full = slowed_prefill_seconds(decode, steps.mixed_seconds(decoding, context, largest, attended), slowdown)
        all_prefills = running * computed / largest * full / parallel
        least = (own**BOTTLENECK_SHARPNESS + all_prefills**BOTTLENECK_SHARPNESS) ** (1.0 / BOTTLENECK_SHARPNESS)
        life = 0.5 * (life + least)
        decoding = 0.5 * (decoding + np.maximum(running * (output - 1.0) * tpot / life, np.minimum(running, 1.0)))
    throughput = running / life
    waiting = np.maximum(concurrency - running, 0.0) / throughput
    first = steps.prefill_seconds(computed, cached)
    # Measured start bursts of other engines are as slow as one prompt in each step.
    together = steps.prompts_seconds(wave, attended) + first
    started = 0.5 * np.where(steps.prefill_steps > 1.0, together, (ranked + 1.0) * first)
    burst = first_token_seconds + np.maximum(started, first) + 0.5 * waiting
    steady = life - (output - 1.0) * tpot
    return ClosedLoad(tpot, steady + waiting, burst, throughput, decoding, running, concurrency)
