"""Means of a closed loop: a fixed number of requests in flight, the next one starts when one ends.

    C = (TTFT + (output - 1) · TPOT) · throughput                                       Little's law
    TPOT = decode(B) + (B - 1) / output · (added time of one prompt's prefill)           B: requests in decode
    TTFT = fixed + half a step + prefill, behind the prefills of other requests          steady state
    TTFT of the start burst = mean wait of C prefills that start at once

Requests beyond the KV cache wait. Pure functions of step times; arguments broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from craton.planning.serving.step_times import ServedSteps

ROUNDS = 12  # of the fixed point


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
) -> ClosedLoad:
    """Return the means of a replica that serves prefill and decode together; `concurrency` is the replica's."""
    output = np.maximum(output, 1.0)
    context = prompt + 0.5 * output
    fitting = np.maximum(np.minimum(steps.max_running, steps.kv_tokens / context), 1.0)
    running = np.minimum(concurrency, fitting)
    chunk = np.minimum(prompt, steps.step_tokens)
    chunks = prompt / chunk
    alone = steps.prefill_seconds(prompt, 0.0)
    decoding = running
    tpot = steps.decode_seconds(running, context)
    for _ in range(ROUNDS):
        decode = steps.decode_seconds(decoding, context)
        mixed = steps.mixed_seconds(decoding, context, chunk, prompt)
        added = chunks * np.maximum(mixed - decode, 0.0) * prefill_slowdown
        service = chunks * (mixed - decode) * prefill_slowdown + chunks * decode
        rate = running / (service + output * tpot)
        parallel = np.minimum(attention_dp, 1.0 + rate * service)  # ranks whose prefills share a step
        goal = decode + np.maximum(decoding - 1.0, 0.0) / output * added / parallel
        tpot = 0.5 * (tpot + goal)
        busy = np.minimum(rate * added / parallel, 0.98)
        queue = np.minimum(0.5 * busy / (1.0 - busy), 0.5 * running) * added / parallel
        boundary = (0.5 + balance_steps * (attention_dp > 1.0)) * tpot * (decoding > 1.0)
        steady = first_token_seconds + boundary + service + queue
        life = steady + (output - 1.0) * tpot
        decoding = 0.5 * (decoding + np.maximum(running * (output - 1.0) * tpot / life, np.minimum(running, 1.0)))
    throughput = running / life
    waiting = np.maximum(concurrency - running, 0.0) / throughput
    started = 0.5 * (running / attention_dp + 1.0) * alone
    burst = first_token_seconds + np.maximum(started, alone) + 0.5 * waiting
    return ClosedLoad(tpot, steady + waiting, burst, throughput, decoding, running)
