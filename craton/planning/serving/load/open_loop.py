"""Latency of a server that requests reach at a given rate, whether or not it keeps up; in closed form.

Every step decodes one token of each running request and fills its budget with chunks of waiting prompts.

    a = B / decode steps of a request                    prompts that arrive in a step, because B = rate · life
    T = (1 − q) · decode(1 + B) + q · mixed(1 + B, t)     mean step; share q of the steps has t prompt tokens
    rate = B / (decode steps · T)                         Little's law; its largest value saturates the server
    TTFT = rest of the running step + queue of chunks + own chunks + wait for KV cache or a slot
    TPOT = T at the B and the backlog that a request meets

B is the mean number of requests in decode. It varies around that slowly: variance B · z / e, with the peakedness z of
the arrivals at decode and the elasticity e of the rate to B. Times are averaged over three values of B.

Percentiles: TTFT, TPOT and end-to-end times are gamma distributed, with the mean and the variance derived here, because
a sum of waits has a gamma distribution's skew; a wait for KV cache is exponential and delays only some requests.
Times that one long step causes together (its rest, prompts in the same step, backlog) are added as fully dependent.
All functions broadcast; the last axis is the deployment. tests/planning/test_open_loop.py compares with a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from craton.planning.serving.load.lengths import TokenLengths
from craton.planning.serving.load.load import ServedLoad
from craton.planning.serving.load.queueing import (
    FULL,
    PERCENTILES,
    Array,
    arrivals_beside,
    bounded_variance,
    chunk_queue_tokens,
    delayed_percentiles,
    gamma_percentiles,
    waiting_probability,
)
from craton.planning.serving.load.steps import ReplicaSteps
from craton.planning.serving.poisson_load import WAITING_TOGETHER
from craton.planning.serving.step_times import slowed_prefill_seconds

# Three nodes of a normal distribution, exact for polynomials up to the fifth degree (Gauss and Hermite).
NODES = np.array([-(3.0**0.5), 0.0, 3.0**0.5])
WEIGHTS = (1.0 / 6.0, 4.0 / 6.0, 1.0 / 6.0)
BATCHES = 32  # of the curve from batch to rate
SMALLEST_BATCH = 0.01
OUTER_ROUNDS = 4  # of the batch, which depends on the backlog
INNER_ROUNDS = 3  # of the step time, which depends on the prompts that arrive during it


@dataclass(frozen=True)
class ServedReplica:
    """One replica's step times and what ReplicaSteps leaves open; fields broadcast over deployments."""

    steps: ReplicaSteps
    attention_dp: Array = 1.0
    first_token_seconds: Array = 0.0  # of a request outside steps: HTTP, tokenizer, launches
    prefill_slowdown: Array = 1.0  # of prompt tokens in a step with decode

    def mixed_seconds(self, load: ServedLoad, batch: Array, decode: Array, tokens: Array) -> Array:
        """Return a step with prompt tokens, beside requests whose decode alone takes `decode` seconds."""
        mixed = self.steps.mixed_seconds(batch, load.context_tokens, tokens, load.prompt_tokens)
        # A lone request has no decode beside it.
        slowdown = 1.0 + (self.prefill_slowdown - 1.0) * (1.0 - 1.0 / np.maximum(batch, 1.0))
        return slowed_prefill_seconds(decode, mixed, slowdown)


class LoadSaturation(NamedTuple):
    """The largest rate of one replica, and what limits it."""

    rate: Array  # requests per second
    batch: Array  # requests in decode
    limit: Array  # index of LIMITS
    prefill_share: Array  # of the time
    batches: Array  # [BATCHES, ...]: the curve up to there
    rates: Array


LIMITS = ("max_running", "KV cache", "prefill", "decode")
GROWING = 0.85  # share of steps with prompts above which it is their rate that makes chunks grow
VARIED_WAIT = 0.7  # standard deviation of the wait for spread prompts, of the longest mean wait
STEEP = 0.35  # more batch raises the rate by less than this share of itself: the GPUs' time is the limit


@dataclass(frozen=True)
class ServedLatencies:
    """Seconds by "mean", "p50", "p90", "p95", "p99"; infinite where the server is saturated."""

    ttft: dict[str, Array]
    tpot: dict[str, Array]
    e2e: dict[str, Array]
    decoding: Array  # requests in decode, of one replica
    prefill_share: Array  # of the steps' time
    saturation: LoadSaturation


class _Steps(NamedTuple):
    """Steps at given requests in decode and a rate: [..] or with leading axes."""

    decode: Array  # seconds without prompts
    mixed: Array  # with the tokens of those that arrive
    share: Array  # of the steps that have prompt tokens
    mean: Array
    full: Array  # with a full budget


def saturation(replica: ServedReplica, load: ServedLoad) -> LoadSaturation:
    """Return the rate at which one replica saturates, and the curve up to it."""
    steps, budget = replica.steps, replica.steps.step_tokens * replica.attention_dp
    room = steps.kv_tokens / load.context_tokens
    # Every request in decode takes a token of the budget, and its prompt's tokens in one of its decode steps.
    chunked = load.decode_steps * budget / (load.prefill.mean + load.decode_steps)
    caps = np.stack(np.broadcast_arrays(np.asarray(steps.max_running, float), room, chunked))
    most = np.maximum(caps.min(axis=0), SMALLEST_BATCH)
    shares = np.linspace(0.0, 1.0, BATCHES).reshape(-1, *[1] * most.ndim)
    batches = SMALLEST_BATCH * (most / SMALLEST_BATCH) ** shares
    arrivals = batches / load.decode_steps
    found = _steps_of(replica, load, 1.0 + batches, arrivals)
    rates = batches / (load.decode_steps * found.mean)
    rates = np.maximum.accumulate(rates, axis=0)
    slope = np.log(rates[-1] / rates[-2]) / np.log(batches[-1] / batches[-2])
    prefill_share = 1.0 - found.decode[-1] / found.mean[-1]
    by_time = np.where(prefill_share >= 0.5, 2, 3)
    limit = np.where((slope < STEEP) | (caps.argmin(axis=0) == 2), by_time, caps.argmin(axis=0))
    return LoadSaturation(rates[-1], most, limit, prefill_share, batches, rates)


def open_load(replica: ServedReplica, load: ServedLoad, rate: Array, slowdown: Array = 1.0) -> ServedLatencies:
    """Return the latencies of one replica at `rate` requests per second, if every step takes `slowdown` times as long:
    such a server at this rate is one of the nominal speed at rate · slowdown, with all times multiplied."""
    limit = saturation(replica, load)
    wanted = np.asarray(rate * slowdown)
    rate = np.minimum(wanted, (1.0 - 1e-6) * limit.rate)
    prompts, output, steps = load.prefill, load.output, replica.steps
    mean_prompt, life_steps = prompts.mean, load.decode_steps
    room_requests = steps.kv_tokens / load.context_tokens
    slots = np.minimum(steps.max_running, room_requests)
    batch, elasticity = _batch_at(limit, rate)
    load_of_chunks: Array = 0.0
    chunk_load: Array = 0.0
    arriving: Array = 0.0  # prompt tokens of a rank, in a step with prompts
    backlog: Array = 0.0
    rank_prompt = mean_prompt / replica.attention_dp
    spreads = bool(np.any(np.asarray(steps.prefill_steps) > 1.0))
    for turn in range(OUTER_ROUNDS):
        # Chunks smooth the arrivals at decode, as a busy queue's departures are its services (Whitt's QNA).
        regular = prompts.variance / mean_prompt**2
        variability = (1.0 - load_of_chunks**2) * load.burstiness + load_of_chunks**2 * regular
        peakedness = np.maximum(1.0 + (variability - 1.0) * _overlap(output), 0.05) / elasticity
        nodes = NODES.reshape(-1, *[1] * np.ndim(batch))
        varied = np.clip(batch + nodes * np.sqrt(batch * peakedness), 0.05 * batch, np.minimum(slots, limit.batch))
        # Another request finds `varied` in decode; one that decodes is itself the one more.
        both = np.stack([varied, 1.0 + varied])
        # Spread prompts wait until a step has as many tokens as arrive during it.
        often = np.minimum(chunk_load, GROWING)
        together = 1.0 + WAITING_TOGETHER * often / (1.0 - often)
        fixed = _fixed_steps(replica, load, both, rank_prompt * together, arriving)
        whole = _fixed_steps(replica, load, both) if spreads else fixed
        seen, met = _split(_steps_at(replica, load, both, rate, fixed, backlog))
        budget = fixed[0][0]
        found = rate * rank_prompt * seen.full
        arriving = 0.5 * (arriving + found) if turn else found
        dispersion = (prompts.variance + load.burstiness * mean_prompt**2) / mean_prompt
        queued, found, most_queued = _queue(
            replica, budget, seen.full, whole[0][0], whole[2][0], rate * rank_prompt, dispersion
        )
        chunk_load = 0.5 * (chunk_load + found) if turn else found
        token_seconds = (seen.full - seen.decode) / budget
        # A request starts to decode at any time but ends after a number of steps, which are short without prompts:
        # part of the backlog at its start is gone at its end, and was worked off in between.
        worked_off = queued * token_seconds * np.maximum(1.0 - seen.mean / seen.full, 0.0) / life_steps
        backlog = np.stack([0.0 * worked_off, worked_off])
        load_of_chunks = _average(chunk_load)
        change = (rate * life_steps * _average(met.mean) - batch) / np.maximum(elasticity, STEEP)
        batch = np.clip(batch + 0.5 * change, 0.5 * batch, np.minimum(slots, limit.batch))

    own_mean, own_variance, own_least = _own_chunks(prompts, seen, budget, token_seconds, replica.attention_dp)
    long_step = _second(seen) / seen.mean  # the step in which a request arrives
    together = arrivals_beside(rate, long_step, load.burstiness)
    room = np.maximum(np.ceil(mean_prompt / budget) * budget - mean_prompt, 0.0) * replica.attention_dp
    beside = token_seconds * np.minimum(together * mean_prompt, room) / replica.attention_dp
    beside_variance = token_seconds**2 * np.minimum(
        rate * long_step * (load.burstiness * mean_prompt**2 + prompts.variance), room**2 / 4.0
    )
    busy = 1.0 - np.exp(-(varied + rate * own_mean))
    rest = busy * long_step / 2.0
    rest_variance = np.maximum(busy * _third(seen) / (3.0 * seen.mean) - rest**2, 0.0)
    wait = queued * seen.full / budget
    most_varied = VARIED_WAIT * most_queued * seen.full / budget
    wait_variance = np.minimum(_wait_variance(prompts, wait, seen.full / budget), most_varied**2)

    servers = np.minimum(steps.max_running, room_requests / load.context_dispersion) / peakedness
    delayed = waiting_probability(servers, batch / slots)
    held = 0.5 * (1.0 + output.variance / output.mean**2)
    delay = batch / rate / servers / (1.0 - np.minimum(batch / slots, FULL)) * held

    joining = busy * (steps.join_steps - 0.5) * seen.mean  # beside the rest of the running step
    parts = own_mean + beside + rest + wait + joining
    spread = np.sqrt(beside_variance) + np.sqrt(rest_variance) + np.sqrt(wait_variance)
    mean = _average(parts)
    variance = _average(own_variance + spread**2 + parts**2) - mean**2
    least = own_least.min(axis=0)
    scale = np.where(wanted > (1.0 - 1e-6) * limit.rate, np.inf, slowdown)
    beyond = np.maximum(mean - least, 1e-3 * mean)
    outside = replica.first_token_seconds
    first = least + delayed_percentiles(beyond, variance, delayed, delay)
    ttft = _named(outside + (mean + delayed * delay) * scale, outside + scale * first)
    tpot_mean, tpot_variance = _tpot_moments(load, rate, met, elasticity)
    longest = whole[2][1].max(axis=0)
    shortest = np.minimum(met.decode[0], tpot_mean)  # no gap between two tokens is shorter than a step without prompts
    above = np.maximum(tpot_mean - shortest, 1e-3 * tpot_mean)
    longest = np.maximum(longest, tpot_mean)
    tpot_variance = np.minimum(tpot_variance, bounded_variance(shortest, tpot_mean, longest))
    tpot_percentiles = np.minimum(shortest + gamma_percentiles(above, tpot_variance), longest)
    tpot = _named(slowdown * tpot_mean, slowdown * tpot_percentiles)
    decode_mean = life_steps * tpot_mean
    decode_variance = tpot_mean**2 * output.variance + output.second_moment * tpot_variance
    whole, all_variance = mean + delayed * delay + decode_mean, variance + delayed * delay**2 + decode_variance
    shortest_answer = max(float(output.array.min()) - 1.0, 0.0) * shortest
    all_beyond = np.maximum(whole - least - shortest_answer, 1e-3 * whole)
    answered = np.maximum(least + gamma_percentiles(all_beyond, all_variance), first) + shortest_answer
    e2e = _named(outside + whole * scale, outside + scale * answered)
    prefill_share = 1.0 - seen.decode[1] / seen.mean[1]
    return ServedLatencies(ttft, tpot, e2e, batch, prefill_share, limit._replace(rate=limit.rate / slowdown))


def _queue(
    replica: ServedReplica, budget: Array, full: Array, most: Array, longest: Array, rate: Array, dispersion: Array
) -> tuple[Array, Array, Array]:
    """Return the mean prompt tokens of a rank that wait for a step, and the load of its steps, if `rate` tokens arrive
    in a second. A step takes `budget` tokens in `full` seconds; the largest takes `most` in `longest`."""
    spread, largest = np.minimum(rate * full / budget, FULL), rate * longest / most
    held = chunk_queue_tokens(largest, most, dispersion) * longest / most * budget / full
    longest_wait = held + np.maximum(replica.steps.prefill_steps - 1.0, 0.0) * budget
    free = np.maximum(chunk_queue_tokens(spread, budget, dispersion), held)
    return np.minimum(free, longest_wait), spread, np.where(replica.steps.prefill_steps > 1.0, longest_wait, np.inf)


def _named(mean: Array, percentiles: Array) -> dict[str, Array]:
    return {"mean": mean, **dict(zip(PERCENTILES, percentiles, strict=True))}


def _fixed_steps(
    replica: ServedReplica, load: ServedLoad, batch: Array, waiting: Array = np.inf, least: Array = 0.0
) -> tuple[Array, Array, Array]:
    """Return a rank's budget of prompt tokens beside `batch` requests in decode, a decode step and a full step;
    `waiting`: prompt tokens that a busy rank has."""
    steps = replica.steps
    wanted = np.maximum(steps.step_budget(waiting, batch / replica.attention_dp), least)
    budget = np.maximum(np.minimum(steps.step_tokens - batch / replica.attention_dp, wanted), 1.0)
    decode = steps.decode_seconds(batch, load.context_tokens)
    return budget, decode, replica.mixed_seconds(load, batch, decode, budget)


def _chunk(replica: ServedReplica, load: ServedLoad, budget: Array, arrivals: Array) -> tuple[Array, Array]:
    """Return the prompt tokens of a rank in a step that has any, and the share of such steps, if `arrivals` prompts
    come during a mean step and the ranks share them evenly."""
    tokens, arrivals = load.prefill.mean / replica.attention_dp, np.maximum(arrivals, 1e-9)
    together = arrivals / -np.expm1(-arrivals)  # prompts of such a step
    chunk = np.minimum(budget, tokens * together)
    return chunk, np.minimum(arrivals * tokens / chunk, 1.0)


def _steps_of(replica: ServedReplica, load: ServedLoad, batch: Array, arrivals: Array) -> _Steps:
    """Return the steps with `batch` requests in decode, if `arrivals` prompts come during a mean step."""
    budget, decode, full = _fixed_steps(replica, load, batch)
    chunk, share = _chunk(replica, load, budget, arrivals)
    mixed = replica.mixed_seconds(load, batch, decode, chunk)
    return _Steps(decode, mixed, share, np.minimum(decode + share * (mixed - decode), full), full)


def _steps_at(
    replica: ServedReplica, load: ServedLoad, batch: Array, rate: Array, fixed: tuple[Array, Array, Array], extra: Array
) -> _Steps:
    """Return the steps with `batch` requests in decode at this rate; `extra` seconds are added to each."""
    budget, decode, full = fixed
    arrivals = rate * decode
    for _ in range(INNER_ROUNDS):
        chunk, share = _chunk(replica, load, budget, arrivals)
        mixed = replica.mixed_seconds(load, batch, decode, chunk)
        added = share * (mixed - decode) / arrivals  # by one prompt
        arrivals = rate * np.minimum((decode + extra) / np.maximum(1.0 - rate * added, 1e-3), full)
    return _Steps(decode, mixed, share, arrivals / rate, full)


def _batch_at(limit: LoadSaturation, rate: Array) -> tuple[Array, Array]:
    """Return the batch at a rate, and the elasticity of the rate to the batch there; linear between logarithms."""
    rates, batches = np.broadcast_arrays(limit.rates, limit.batches)
    shape = np.broadcast_shapes(np.shape(rate), rates.shape[1:])
    lead = len(shape) - (rates.ndim - 1)
    rates = np.broadcast_to(np.log(rates).reshape(BATCHES, *[1] * lead, *rates.shape[1:]), (BATCHES, *shape))
    batches = np.broadcast_to(np.log(batches).reshape(BATCHES, *[1] * lead, *batches.shape[1:]), (BATCHES, *shape))
    wanted = np.log(np.broadcast_to(rate, shape))
    upper = np.clip((rates < wanted).sum(axis=0), 1, BATCHES - 1)[None]
    x0, x1 = (np.take_along_axis(rates, upper - 1 + side, 0)[0] for side in (0, 1))
    y0, y1 = (np.take_along_axis(batches, upper - 1 + side, 0)[0] for side in (0, 1))
    elasticity = np.clip((x1 - x0) / (y1 - y0), 0.05, 1.0)
    return np.exp(y0 + (wanted - x0) / elasticity), elasticity


def _split(steps: _Steps) -> tuple[_Steps, _Steps]:
    return _Steps(*(part[0] for part in steps)), _Steps(*(part[1] for part in steps))


def _average(values: Array) -> Array:
    low, middle, high = values
    return WEIGHTS[0] * low + WEIGHTS[1] * middle + WEIGHTS[2] * high


def _second(steps: _Steps) -> Array:
    return (1.0 - steps.share) * steps.decode**2 + steps.share * steps.mixed**2


def _third(steps: _Steps) -> Array:
    return (1.0 - steps.share) * steps.decode**3 + steps.share * steps.mixed**3


def _overlap(output: TokenLengths) -> float:
    """Return E[min(N, N')] / E[N] of two outputs: how much of a burst of arrivals is in decode at the same time."""
    return float(np.minimum.outer(output.array, output.array).mean() / output.mean)


def _own_chunks(
    prompts: TokenLengths, steps: _Steps, budget: Array, token_seconds: Array, ranks: Array
) -> tuple[Array, Array, Array]:
    """Return mean, variance and minimum of the time of a prompt's own chunks."""
    tokens = prompts.array.reshape(-1, *[1] * np.ndim(budget))
    own = np.ceil(tokens / budget) * steps.decode + token_seconds * tokens / ranks
    return own.mean(axis=0), own.var(axis=0), own.min(axis=0)


def _wait_variance(prompts: TokenLengths, wait: Array, seconds_per_token: Array) -> Array:
    """Return the variance of the wait in an M/G/1 queue with this mean: E²[w] + rate · E[s³] / (3 · idle)."""
    second, third = prompts.second_moment, float((prompts.array**3).mean())
    ratio = 2.0 * third / (3.0 * second) * seconds_per_token  # of the two terms of the second moment
    return wait**2 + wait * ratio


def _tpot_moments(load: ServedLoad, rate: Array, steps: _Steps, elasticity: Array) -> tuple[Array, Array]:
    """Return mean and variance over requests: B varies slowly, and the number of prompts met varies. More prompts make
    a request stay longer, and meet more: the factor 1 / (1 − rate · prompt's time)."""
    prompts, output = load.prefill, load.output
    mean = _average(steps.mean)
    variance = np.maximum(_average(steps.mean**2) - mean**2, 0.0)
    # B over a request's life: its correlation decays at the rate e / life.
    held = 2.0 / elasticity * (1.0 + np.expm1(-elasticity) / elasticity)
    middle = _Steps(*(part[1] for part in steps))
    added = (middle.mean - middle.decode) / np.maximum(rate * middle.mean, 1e-300)  # by one prompt
    met = rate * mean * added**2 * (load.burstiness + prompts.variance / prompts.mean**2)
    met = met * float((1.0 / np.maximum(output.array - 1.0, 1.0)).mean())
    return mean, variance * held + met / (1.0 - np.minimum(rate * added, 0.9)) ** 2
