"""Latency of candidate deployments under a load, and the largest load of one replica within limits; as arrays.

Intervals: all step times of a deployment are multiplied by exp(± z · deviation), z of an 80% interval. TTFT varies
more: what a profile leaves unexplained of it is added in quadrature, to the logarithm.
A closed load has the means of `closed_loop`, and the percentiles and the start burst of `closed_latencies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.load import (
    ClosedLatencies,
    ServedLatencies,
    ServedLoad,
    closed_latencies,
    open_load,
    saturation,
)
from craton.planning.serving.search.replicas import ServedCandidates

Limits = Mapping[tuple[str, str], float]  # (ttft, tpot or e2e; statistic) → seconds
INTERVAL_Z = 1.2816  # of the standard normal: 10% and 90%
SHARES = np.array([0.1, 0.3, 0.5, 0.65, 0.78, 0.88, 0.95, 1.0])  # of the saturation rate


@dataclass(frozen=True)
class Evaluated:
    """Arrays over candidates, with a first axis of nominal, fast and slow steps."""

    latencies: ServedLatencies
    rate: Any  # requests per second of one replica


def slowdowns(candidates: ServedCandidates) -> np.ndarray:
    """Return factors of the step times: nominal, and both ends of the 80% interval."""
    ends = np.array([0.0, -INTERVAL_Z, INTERVAL_Z]) * candidates.log_deviation
    return np.exp(candidates.log_scale + ends).reshape(-1, 1)


def evaluate(candidates: ServedCandidates, load: ServedLoad, replicas: Any) -> Evaluated:
    """Return what each candidate has under its share of the load."""
    factors = slowdowns(candidates)
    if load.concurrency is not None:
        closed = _closed(candidates, load, load.concurrency / np.asarray(replicas, float), factors)
        return replace(closed, latencies=with_first_token_spread(candidates, closed.latencies))
    assert load.rate is not None
    share = load.rate / np.asarray(replicas, float)
    found = open_load(candidates.replica, load, share + 0.0 * factors, factors)
    prefill = with_own_prefill(candidates, load, found.prefill_share, found.decoding, found.decoding)
    found = replace(found, prefill_share=prefill)
    return Evaluated(with_first_token_spread(candidates, found), share + 0.0 * factors)


def with_first_token_spread(candidates: ServedCandidates, found: ServedLatencies, axis: int = 0) -> ServedLatencies:
    """Return the latencies with the interval of TTFT, along the axis of nominal, fast and slow steps."""
    ttft = {name: widened(candidates, seconds, axis) for name, seconds in found.ttft.items()}
    e2e = {name: _with_ttft(found.e2e[name], found.ttft[name], ttft[name], axis) for name in ttft}
    return replace(found, ttft=ttft, e2e=e2e)


def widened(candidates: ServedCandidates, seconds: Any, axis: int = 0) -> np.ndarray:
    """Return a TTFT along the axis of nominal, fast and slow steps, with the whole spread of TTFT."""
    nominal, fast, slow = np.moveaxis(np.broadcast_to(seconds, _shape(seconds, axis)), axis, 0)
    extra = np.sqrt(max(candidates.ttft_deviation**2 - candidates.log_deviation**2, 0.0))
    least = INTERVAL_Z * candidates.ttft_deviation
    with np.errstate(invalid="ignore"):
        down = np.maximum(np.hypot(np.log(nominal / fast), INTERVAL_Z * extra), least)
        up = np.maximum(np.hypot(np.log(slow / nominal), INTERVAL_Z * extra), least)
        ends = np.stack([nominal, nominal * np.exp(-down), nominal * np.exp(up)])
    return np.moveaxis(np.where(np.isfinite(nominal), ends, np.stack([nominal, fast, slow])), 0, axis)


def _with_ttft(whole: Any, before: Any, after: Any, axis: int) -> np.ndarray:
    """Return end-to-end times whose intervals have what was added to those of TTFT."""
    nominal, fast, slow = np.moveaxis(np.broadcast_to(whole, _shape(whole, axis)), axis, 0)
    with np.errstate(invalid="ignore"):  # unbounded times need no more
        added = np.moveaxis(np.nan_to_num(np.abs(after - before), posinf=0.0), axis, 0)
        low = nominal - np.minimum(np.hypot(nominal - fast, added[1]), 0.9 * nominal)
        ends = np.stack([nominal, low, nominal + np.hypot(slow - nominal, added[2])])
    return np.moveaxis(np.where(np.isfinite(nominal), ends, np.stack([nominal, fast, slow])), 0, axis)


def _shape(values: Any, axis: int) -> tuple[int, ...]:
    shape = list(np.shape(values))
    shape[axis] = 3
    return tuple(shape)


def largest_load(candidates: ServedCandidates, load: ServedLoad, limits: Limits) -> np.ndarray:
    """Return the largest rate of one replica (with `concurrency`: number of users) within all limits; 0: none is.

    Latency grows with the load, so the largest of SHARES within the limits is refined once between it and the next."""
    nominal = slowdowns(candidates)[:1]
    if load.concurrency is not None:
        users = np.full(len(candidates), float(load.concurrency))
        if not limits:
            return users
        loads = np.maximum(users ** SHARES.reshape(-1, 1), 1.0)
    else:
        most = np.asarray(saturation(candidates.replica, load).rate) / nominal[0] * (1.0 - 1e-4)
        if not limits:
            return np.asarray(most)
        loads = SHARES.reshape(-1, 1) * most
    low, high = np.zeros_like(loads[0]), loads[0]
    for _ in range(2):
        good = _keeps(candidates, load, loads, limits, nominal)
        held = np.cumprod(good, axis=0).sum(axis=0)
        known = np.concatenate([low[None], loads])
        low = np.take_along_axis(known, held[None], 0)[0]
        high = np.take_along_axis(known, np.minimum(held + 1, len(loads))[None], 0)[0]
        loads = low + SHARES.reshape(-1, 1) * (high - low)
    return np.asarray(low)


def _keeps(
    candidates: ServedCandidates, load: ServedLoad, loads: np.ndarray, limits: Limits, nominal: np.ndarray
) -> Any:
    if load.concurrency is not None:
        found = _closed(candidates, load, np.maximum(loads, 1.0), nominal).latencies
    else:
        found = open_load(candidates.replica, load, loads, nominal)
    return np.all([_latency(found, name) <= limit for name, limit in limits.items()], axis=0)


def _latency(found: ServedLatencies, name: tuple[str, str]) -> Any:
    latency: dict[str, Any] = getattr(found, name[0])
    return latency[name[1]]


def _closed(candidates: ServedCandidates, load: ServedLoad, users: Any, factors: np.ndarray) -> Evaluated:
    replica = candidates.replica
    steps: Any = replica.steps
    loop = closed_loop(
        steps,
        users,
        load.input.mean,
        load.output.mean,
        first_token_seconds=0.0,
        attention_dp=replica.attention_dp,
        prefill_slowdown=replica.prefill_slowdown,
        cached=load.prefix_hits * load.input.mean,
        waves=float(load.output.variance == 0.0),
    )
    inside = closed_latencies(replace(replica, first_token_seconds=0.0), load, users, loop, load.burst_share)
    outside = {"ttft": replica.first_token_seconds, "tpot": 0.0, "e2e": replica.first_token_seconds}
    ttft, tpot, e2e = (
        {statistic: outside[name] + seconds * factors for statistic, seconds in getattr(inside, name).items()}
        for name in outside
    )
    rate, decoding = requests_per_second(load, users, inside), np.asarray(loop.decoding)
    prefill_share = 1.0 - steps.decode_seconds(decoding, load.context_tokens) / loop.tpot_seconds
    prefill_share = with_own_prefill(candidates, load, prefill_share, decoding, np.maximum(decoding - 1.0, 0.0))
    limit = saturation(replica, load)
    largest = np.maximum(limit.rate, rate) / factors
    found = ServedLatencies(ttft, tpot, e2e, decoding, prefill_share, limit._replace(rate=largest))
    return Evaluated(found, rate / factors)


def requests_per_second(load: ServedLoad, users: Any, inside: ClosedLatencies) -> np.ndarray:
    """Return the throughput: by Little's law, but for the end of a benchmark, when no requests follow the last ones."""
    rate = np.asarray(users / inside.e2e["mean"])
    if load.requests is None or load.concurrency is None:
        return rate
    requests = load.requests * users / load.concurrency  # of this replica
    return np.asarray(requests / ((requests - users) / rate + inside.drain_seconds))


def with_own_prefill(candidates: ServedCandidates, load: ServedLoad, share: Any, batch: Any, others: Any) -> Any:
    """Return the share of prefill in the time of a server's steps, where `share` is that of the prompts that a request
    in decode meets, of `others`; its own prompt was computed before."""
    steps = candidates.replica.steps
    prefill = steps.prefill_seconds(load.prefill.mean, load.prefix_hits * load.input.mean)
    decode = load.decode_steps * steps.decode_seconds(np.maximum(batch, 1.0), load.context_tokens)
    return share + (1.0 - share) * prefill / (prefill + decode) / (1.0 + others)
