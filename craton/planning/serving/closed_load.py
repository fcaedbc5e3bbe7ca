"""Means of a closed loop: a fixed number of requests in flight, the next one starts when one ends.

    C = (TTFT + (output - 1) · TPOT) · throughput                                       Little's law
    TPOT = decode(B) + (B - 1) / output · (added time of one prompt's prefill)           B: requests in decode
    TTFT = fixed + steps until it joins + its prefill, or what Little's law leaves if prefill is the bottleneck
    TTFT of the start burst = mean wait of C prefills that start at once

Requests that start together end together, so a wave's prompts share steps: the chunk is that of WAVE_SHARE of a wave.
Requests beyond the KV cache wait. Pure functions of step times; arguments broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from craton.planning.serving.step_times import ServedSteps

ROUNDS = 20  # of the fixed point
# Share of a wave that waits together, with outputs of one length. A simulated scheduler whose users answer at once
# keeps 0.3 to 0.5 together; measurements of our server, whose clients and HTTP spread the requests, fit 0.05 to 0.2.
WAVE_SHARE = 0.12
BOTTLENECK_SHARPNESS = 5.0  # of the maximum of a request's own time and that of all prefills


@dataclass(frozen=True)
class ClosedLoad:
    """Seconds are means over requests; `decoding` requests are in decode, `running` at most fit."""

    tpot_seconds: Any
    steady_ttft_seconds: Any
    burst_ttft_seconds: Any  # of the requests that start together
    requests_per_second: Any  # of the replica
    decoding: Any
    running: Any

    def mean_ttft_seconds(self, burst_share: Any) -> Any:
        """`burst_share`: of the requests, that start together: concurrency / number of requests."""
        return (1.0 - burst_share) * self.steady_ttft_seconds + burst_share * self.burst_ttft_seconds


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
) -> ClosedLoad:
    """Return the means of a replica that serves prefill and decode together; `concurrency` is the replica's, `cached`
    the tokens of each prompt that the prefix cache has."""
    output = np.maximum(output, 1.0)
    context = prompt + 0.5 * output
    fitting = np.maximum(np.minimum(steps.max_running, steps.kv_tokens / context), 1.0)
    running = np.minimum(concurrency, fitting)
    computed = np.maximum(prompt - cached, 1.0)
    attended = computed + 2.0 * cached  # the length of a prompt whose queries see as many keys
    wave = running / attention_dp * computed  # tokens of a rank
    chunks = computed / steps.chunk_tokens(np.maximum(WAVE_SHARE * wave, computed))
    own_chunks = steps.prefill_chunks(computed, wave)
    decoding = running
    tpot = steps.decode_seconds(running, context)
    for _ in range(ROUNDS):
        decode = steps.decode_seconds(decoding, context)
        mixed = steps.mixed_seconds(decoding, context, computed / chunks, attended)
        mixed = decode + np.maximum(mixed - decode, 0.0) * prefill_slowdown
        rate = running / (steps.join_steps * decode + own_chunks * mixed + output * tpot)
        parallel = np.minimum(attention_dp, 1.0 + rate * chunks * mixed)  # ranks whose prefills share a step
        goal = decode + np.maximum(decoding - 1.0, 0.0) / output * chunks * (mixed - decode) / parallel
        tpot = 0.5 * (tpot + goal)
        busy = np.minimum(rate * chunks * mixed / parallel, 1.0)
        step = busy * mixed + (1.0 - busy) * decode
        joining = (steps.join_steps * step + balance_steps * (attention_dp > 1.0) * tpot) * (decoding > 1.0)
        own = first_token_seconds + joining + own_chunks * mixed + (output - 1.0) * tpot
        all_prefills = running * chunks * mixed / parallel
        life = (own**BOTTLENECK_SHARPNESS + all_prefills**BOTTLENECK_SHARPNESS) ** (1.0 / BOTTLENECK_SHARPNESS)
        decoding = 0.5 * (decoding + np.maximum(running * (output - 1.0) * tpot / life, np.minimum(running, 1.0)))
    throughput = running / life
    waiting = np.maximum(concurrency - running, 0.0) / throughput
    alone = steps.prefill_seconds(computed, cached)
    started = 0.5 * (steps.prompts_seconds(wave, attended) + alone)
    burst = first_token_seconds + np.maximum(started, alone) + 0.5 * waiting
    steady = life - (output - 1.0) * tpot
    return ClosedLoad(tpot, steady + waiting, burst, throughput, decoding, running)
