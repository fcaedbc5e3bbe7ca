"""Means of a load that arrives at random, whether or not the server has answered: Poisson arrivals, lengths as given.

    TPOT = share · mixed + (1 - share) · decode        share: of a request's steps that also have prompt tokens
    TTFT = fixed + rest of a step + queue + own prefill                  the queue of a server with one kind of job
    B = rate · output · TPOT                                                                     Little's law

A request begins to decode when prefills are going on, more often than at any time, and that passes after the busy
period. Where prompts are spread over steps, the more of them wait, the larger the chunks. The planner's distributions
of latency are in `load`; this is the form that measurements are fitted with, and it broadcasts over servers and loads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from craton.planning.serving.step_times import ServedSteps, slowed_prefill_seconds

ROUNDS = 24  # of the fixed point
FULL = 0.97  # largest share of the time with prefill
# Against a simulated scheduler at 20 to 95 % load; tests/planning/test_spread_prefill.py.
WAITING_TOGETHER = 0.35  # prompts beside one that waits, for each in an M/D/1 queue
BUSY_MEMORY = 0.6  # of a busy and an idle period, for which a request still sees the one it started in


class PoissonLoad(NamedTuple):
    tpot_seconds: Any
    ttft_seconds: Any


def poisson_load(
    steps: ServedSteps,
    rate: Any,
    prompt: Any,
    output: Any,
    *,
    first_token_seconds: Any = 0.0,
    prefill_slowdown: Any = 1.0,
    cached: Any = 0.0,
) -> PoissonLoad:
    """Return the means of a replica that `rate` requests per second reach."""
    context = prompt + 0.5 * output
    computed = np.maximum(prompt - cached, 1.0)
    attended = computed + 2.0 * cached
    alone, most = steps.prefill_chunks(computed, computed), steps.step_tokens
    together = WAITING_TOGETHER * (steps.prefill_steps > 1.0)
    batch, busy, arriving = np.ones_like(prompt), np.zeros_like(prompt), np.zeros_like(prompt)
    for _ in range(ROUNDS):
        decode = steps.decode_seconds(batch, context)
        waiting = computed * (1.0 + together * busy / (1.0 - busy))
        chunk = np.maximum(steps.chunk_tokens(waiting, batch), arriving)
        chunks = computed / chunk
        mixed = steps.mixed_seconds(batch, context, chunk, attended)
        mixed = slowed_prefill_seconds(decode, mixed, prefill_slowdown)
        arriving = 0.5 * (arriving + np.minimum(rate * computed * mixed, most))
        busy = 0.5 * (busy + np.minimum(rate * chunks * mixed, FULL))
        share = rate * chunks / (rate * chunks + (1.0 - busy) / decode)
        memory = BUSY_MEMORY * (chunks / (1.0 - busy) + 1.0 / (rate * decode))  # steps
        share = share + (busy - share) * memory / output * (1.0 - np.exp(-output / memory))
        tpot = share * mixed + (1.0 - share) * decode
        batch = 0.5 * (batch + np.minimum(np.maximum(rate * output * tpot, 1.0), steps.max_running))
    own = np.maximum(busy * chunks + (1.0 - busy) * alone, 1.0)
    full = slowed_prefill_seconds(decode, steps.mixed_seconds(batch, context, most, attended), prefill_slowdown)
    largest = np.minimum(rate * computed / most * full, FULL)
    held = 0.5 * largest / (1.0 - largest) * computed / most * full
    queue = np.maximum(0.5 * busy / (1.0 - busy) * chunks * mixed, held)
    # Prompts that wait are spread over steps: the more there are, the larger the chunks.
    queue = np.minimum(queue, held + np.maximum(steps.prefill_steps - own, 0.0) * mixed)
    # The rest of a step with prompts is in the queue.
    joining = steps.join_steps * (1.0 - busy) * decode + np.maximum(steps.join_steps - 0.5, 0.0) * busy * mixed
    return PoissonLoad(tpot, first_token_seconds + joining + own * mixed + queue)
