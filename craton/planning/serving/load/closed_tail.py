"""Percentiles of a closed load, and its start burst, beside the means of `closed_loop`.

    TTFT = own chunks + rest of a step + queue behind other prompts + wait for a slot or KV cache
    TPOT = step + prompts of other users that a request meets

A closed load has as many requests in flight at any time as it has users, so the batch hardly varies, and a request
meets about one prompt of each other user: their number varies with the lengths of outputs, and not like Poisson
arrivals. The wait for a slot is a sum of many completions, and varies little. TTFT, TPOT and end-to-end times are gamma
distributed with these moments.

A benchmark begins with all users at once. Those that find a slot wait for the prompts before them, the others for
answers to end; both waits are uniform. All functions broadcast; the last axis is the deployment.
tests/planning/test_closed_tail.py compares with a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from craton.planning.serving.closed_load import ClosedLoad
from craton.planning.serving.load.load import ServedLoad
from craton.planning.serving.load.open_loop import ServedReplica
from craton.planning.serving.load.queueing import (
    PERCENTILES,
    Array,
    bounded_variance,
    chunk_queue_tokens,
    floored_share,
    gamma_percentiles,
    gamma_share,
    mixture_percentiles,
    uniform_share,
)

REACH = 12.0  # a percentile up to p99 is below the mean plus this many standard deviations
Statistics = dict[str, Array]  # seconds by "mean" and the names of PERCENTILES


class ClosedLatencies(NamedTuple):
    ttft: Statistics
    tpot: Statistics
    e2e: Statistics
    drain_seconds: Array  # of a benchmark: from when its last requests are sent until all are answered


class _Wave(NamedTuple):
    """Requests whose first tokens come evenly between two times after the start."""

    share: Array  # of all requests
    first: Array
    last: Array

    @property
    def mean(self) -> Array:
        return 0.5 * (self.first + self.last)

    @property
    def variance(self) -> Array:
        return (self.last - self.first) ** 2 / 12.0


class _Step(NamedTuple):
    """Steps beside the requests in decode."""

    budget: Array  # prompt tokens of a rank
    decode: Array  # seconds without prompts
    full: Array  # seconds with a full budget


def closed_latencies(
    replica: ServedReplica, load: ServedLoad, users: Array, loop: ClosedLoad, burst_share: float = 0.0
) -> ClosedLatencies:
    """Return the latencies of one replica with `users`, whose means without `first_token_seconds` are `loop`.
    `burst_share`: of the requests, those that begin at once."""
    step = _step(replica, load, loop.decoding)
    token_seconds = (step.full - step.decode) / step.budget
    rate, output = np.asarray(loop.requests_per_second), load.output
    waiting = np.maximum(users - loop.running, 0.0)
    tokens = load.prefill.array.reshape(-1, *[1] * np.ndim(step.decode))
    own = _own_seconds(replica, load, loop.decoding, step, tokens)

    # `loop` has prompts of the mean length; long ones take more steps.
    longer = own.mean(axis=0) - _own_seconds(replica, load, loop.decoding, step, load.prefill.mean)
    queued = _queue_seconds(replica, load, rate, step) if output.variance else 0.0
    mean, slot = np.asarray(loop.steady_ttft_seconds) + np.maximum(longer, 0.0) + queued, waiting / rate
    shared = np.maximum(mean - own.mean(axis=0) - slot, 0.0)
    rest = np.minimum(shared, 0.5 * step.decode)  # of a step, at any time of which requests come
    uneven = output.variance / output.mean**2  # of the times between a user's requests
    variance = own.var(axis=0) + rest**2 / 3.0 + (shared - rest) ** 2 + waiting * uneven / rate**2
    least = np.clip(own.min(axis=0) + slot, 0.0, np.maximum(mean - np.sqrt(variance), 0.0))
    beyond = np.maximum(mean - least, 1e-3 * mean)

    tpot_mean = np.asarray(loop.tpot_seconds)
    added = token_seconds * load.prefill.mean / replica.attention_dp
    uneven_prompts = load.prefill.variance / load.prefill.mean**2
    met = rate * tpot_mean * added**2 * (uneven + uneven_prompts)
    tpot_variance = met * float((1.0 / np.maximum(output.array - 1.0, 1.0)).mean())
    shortest = np.minimum(step.decode, tpot_mean)  # no gap between two tokens is shorter than a step without prompts
    longest = np.maximum(step.full, tpot_mean)
    tpot_variance = np.minimum(tpot_variance, bounded_variance(shortest, tpot_mean, longest))
    tpot = shortest + gamma_percentiles(np.maximum(tpot_mean - shortest, 1e-3 * tpot_mean), tpot_variance)
    tpot = np.minimum(tpot, longest)
    answer_mean = load.decode_steps * tpot_mean
    answer_variance = tpot_mean**2 * output.variance + output.second_moment * tpot_variance

    outside, waves = replica.first_token_seconds, _burst(replica, load, users, loop, burst_share)
    ttft_mean = (1.0 - burst_share) * mean + sum(wave.share * wave.mean for wave in waves)

    def first_token_below(time: Array) -> Array:
        steady = gamma_share(time - least, beyond, variance)
        return (1.0 - burst_share) * steady + sum(
            wave.share * uniform_share(time, wave.first, wave.last) for wave in waves
        )

    shortest_answer = max(float(output.array.min()) - 1.0, 0.0) * shortest

    spreads = [wave.variance + answer_variance for wave in waves]

    def answer_below(time: Array) -> Array:
        steady = floored_share(time, least + shortest_answer, mean + answer_mean, variance + answer_variance)
        return (1.0 - burst_share) * steady + sum(
            wave.share * floored_share(time, wave.first + shortest_answer, wave.mean + answer_mean, spread)
            for wave, spread in zip(waves, spreads, strict=True)
        )

    last = _largest([mean, *(wave.last for wave in waves)])
    widest = np.sqrt(variance + answer_variance + _largest([0.0 * mean, *(wave.variance for wave in waves)]))
    ttft = mixture_percentiles(first_token_below, last + REACH * np.sqrt(variance))
    e2e = mixture_percentiles(answer_below, last + answer_mean + REACH * widest)
    e2e = np.maximum(e2e, ttft + shortest_answer)
    return ClosedLatencies(
        _named(outside + ttft_mean, outside + ttft),
        _named(tpot_mean, tpot),
        _named(outside + ttft_mean + answer_mean, outside + e2e),
        outside + _drain_seconds(load, waves, step.decode),
    )


def _drain_seconds(load: ServedLoad, waves: Sequence[_Wave], decode: Array) -> Array:
    """Return the time in which the requests of these waves are answered, if no prompts follow them: the last one has an
    answer of mean length, the longest answer begins in the middle."""
    last, longest = load.decode_steps * decode, max(load.output.longest - 1.0, 0.0) * decode
    ends = [np.where(wave.share > 0.0, np.maximum(wave.last + last, wave.mean + longest), 0.0) for wave in waves]
    return _largest([0.0 * decode, *ends])


def _burst(
    replica: ServedReplica, load: ServedLoad, users: Array, loop: ClosedLoad, burst_share: float
) -> tuple[_Wave, ...]:
    """Return the requests that begin at once: those with a slot, whose prompts fill every step, and the others."""
    if not burst_share:
        return ()
    steps, prompt, ranks = replica.steps, load.prefill.mean, replica.attention_dp
    half = _step(replica, load, 0.5 * loop.decoding)  # decode grows while prompts are worked off
    each = prompt / (half.budget * ranks) * half.full
    tokens = np.minimum(steps.step_tokens, np.maximum(loop.running / ranks, 1.0) * prompt)
    step = steps.mixed_seconds(0.0, load.context_tokens, tokens, load.prompt_tokens)
    first = np.maximum(step, steps.prefill_seconds(prompt, load.prefix_hits * load.input.mean))
    last = np.maximum(first, loop.running * each)
    with_slot = np.minimum(loop.running / users, 1.0)
    served = np.maximum(loop.running / loop.requests_per_second, first)
    waited = np.maximum(users - loop.running, 0.0) / loop.requests_per_second + 0.5 * last
    return (
        _Wave(burst_share * with_slot, first, last),
        _Wave(burst_share * (1.0 - with_slot), served, np.maximum(served, waited)),
    )


def _own_seconds(replica: ServedReplica, load: ServedLoad, batch: Array, step: _Step, tokens: Array) -> Array:
    """Return the seconds of the steps that compute prompts of these lengths."""
    chunks = np.ceil(
        tokens / np.minimum(step.budget, replica.steps.step_budget(load.prefill.mean, batch / replica.attention_dp))
    )
    return chunks * replica.mixed_seconds(load, batch, step.decode, tokens / chunks)


def _queue_seconds(replica: ServedReplica, load: ServedLoad, rate: Array, step: _Step) -> Array:
    """Return the mean wait for prompts that are left over from earlier steps, if requests come at random times."""
    prompts = load.prefill
    dispersion = (prompts.variance + prompts.mean**2) / prompts.mean
    share = rate * prompts.mean / replica.attention_dp * step.full / step.budget
    return chunk_queue_tokens(share, step.budget, dispersion) * step.full / step.budget


def _step(replica: ServedReplica, load: ServedLoad, batch: Array) -> _Step:
    steps = replica.steps
    budget = np.maximum(steps.step_tokens - batch / replica.attention_dp, 1.0)
    decode = np.asarray(steps.decode_seconds(batch, load.context_tokens))
    return _Step(budget, decode, replica.mixed_seconds(load, batch, decode, budget))


def _largest(values: Sequence[Array]) -> Array:
    return np.max(np.broadcast_arrays(*values), axis=0)


def _named(mean: Array, percentiles: Array) -> Statistics:
    return {"mean": mean, **dict(zip(PERCENTILES, percentiles, strict=True))}
