"""Lines of plots: latency of the chosen deployment against its rate, and throughput per GPU against that per user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from craton.infrastructure import Cluster
from craton.planning.serving.load import ServedLoad, open_load, saturation
from craton.planning.serving.search.evaluate import slowdowns, with_first_token_spread
from craton.planning.serving.search.replicas import ServedCandidates
from craton.planning.serving.search.result import CURVE_SHARES, CurvePoint, Deployment, FrontPoint, Interval
from craton.planning.serving.search.rows import latency_intervals

FRONT_ROWS = slice(10, None, 2)  # of the curve from batch to rate: fewer requests are as fast as one


def curve_points(candidates: ServedCandidates, load: ServedLoad, chosen: Deployment) -> list[CurvePoint]:
    """Return the latencies of the chosen deployment, up to where it saturates."""
    index = candidates.layouts.index(replace(chosen.layout, replicas=1))
    replica, replicas = candidates.only([index]).replica, chosen.layout.replicas
    open_ = replace(load, concurrency=None)
    factors = slowdowns(candidates)[None]
    limit = float(np.ravel(saturation(replica, open_).rate)[0]) / factors[0, 0, 0]
    rates = np.array(CURVE_SHARES).reshape(-1, 1, 1) * limit
    found = open_load(replica, open_, rates + 0.0 * factors, factors + 0.0 * rates)
    found = with_first_token_spread(candidates, found, axis=1)

    def at_rate(row: int, latency: dict[str, Any]) -> dict[str, Interval]:
        return latency_intervals({name: seconds[row] for name, seconds in latency.items()}, 0)

    return [
        CurvePoint(float(rate) * replicas, at_rate(row, found.ttft), at_rate(row, found.tpot))
        for row, rate in enumerate(rates.ravel())
    ]


def front_points(candidates: ServedCandidates, cluster: Cluster, load: ServedLoad) -> list[FrontPoint]:
    """Return every layout at rising rates, and which points no other one beats in both."""
    nominal = float(slowdowns(candidates)[0, 0])
    limit = saturation(candidates.replica, replace(load, concurrency=None))
    batches, rates = limit.batches[FRONT_ROWS], limit.rates[FRONT_ROWS] / nominal
    tpot = batches / (rates * load.decode_steps)  # Little's law
    sizes = np.array([layout.replica_gpus for layout in candidates.layouts])
    per_gpu, per_user = rates * load.output.mean / sizes, 1.0 / tpot
    steps: Any = candidates.replica.steps
    tokens = rates * tpot * load.prefill.mean / np.asarray(steps.attention_dp)
    parts = steps.terms(1.0 + batches, load.context_tokens, tokens, load.prompt_tokens)
    names = list(parts)
    largest = np.argmax(np.stack([np.broadcast_to(part, rates.shape) for part in parts.values()]), axis=0)
    on_front = _front(per_gpu.ravel(), per_user.ravel()).reshape(per_gpu.shape)
    return [
        FrontPoint(
            candidates.layouts[column],
            cluster.instance.name,
            float(rates[row, column]),
            float(per_gpu[row, column]),
            float(per_user[row, column]),
            names[largest[row, column]],
            bool(on_front[row, column]),
        )
        for column in range(len(candidates))
        for row in range(len(rates))
    ]


def _front(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    order = np.lexsort((-other, -one))
    best = np.maximum.accumulate(other[order])
    is_new = np.concatenate([[True], other[order][1:] > best[:-1]])
    result = np.zeros(len(one), bool)
    result[order[is_new]] = True
    return result
