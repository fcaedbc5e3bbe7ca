"""Lines of plots: latency of the chosen deployment against its rate, and throughput per GPU against that per user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from craton.infrastructure import Cluster
from craton.planning.serving.load import ServedLoad, open_load, saturation
from craton.planning.serving.search.evaluate import slowdowns
from craton.planning.serving.search.replicas import Candidates
from craton.planning.serving.search.result import STATISTICS, CurvePoint, Deployment, FrontPoint, Interval

CURVE_SHARES = np.array([0.05, *np.arange(0.1, 0.9, 0.1), 0.85, 0.9, 0.94, 0.97])  # of the saturation rate
FRONT_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])


def curve_points(candidates: Candidates, load: ServedLoad, chosen: Deployment) -> list[CurvePoint]:
    """Return the latencies of the chosen deployment, up to where it saturates."""
    index = next((place for place, one in enumerate(candidates.layouts) if _same(one, chosen.layout)), None)
    if index is None or chosen.prefill is not None:
        return []
    replica, replicas = candidates.only([index]).replica, chosen.layout.replicas
    open_ = replace(load, concurrency=None)
    factors = slowdowns(candidates)[None]
    limit = float(np.ravel(saturation(replica, open_).rate)[0]) / factors[0, 0, 0]
    rates = (CURVE_SHARES * limit).reshape(-1, 1, 1)
    found = open_load(replica, open_, rates + 0.0 * factors, factors + 0.0 * rates)

    def point(row: int, latency: dict[str, Any]) -> dict[str, Interval]:
        return {name: Interval(*(float(value) for value in latency[name][row, :, 0])) for name in STATISTICS}

    return [
        CurvePoint(float(rate) * replicas, point(row, found.ttft), point(row, found.tpot))
        for row, rate in enumerate(rates.ravel())
    ]


def front_points(candidates: Candidates, cluster: Cluster, load: ServedLoad) -> list[FrontPoint]:
    """Return every layout at rising rates, and which points no other one beats in both."""
    open_ = replace(load, concurrency=None)
    nominal = slowdowns(candidates)[:1]
    rates = FRONT_SHARES.reshape(-1, 1) * np.asarray(saturation(candidates.replica, open_).rate) / nominal
    found = open_load(candidates.replica, open_, rates, nominal + 0.0 * rates)
    sizes = np.array([layout.replica_gpus for layout in candidates.layouts])
    per_gpu, per_user = rates * load.output.mean / sizes, 1.0 / np.asarray(found.tpot["mean"])
    steps: Any = candidates.replica.steps
    tokens = rates * np.asarray(found.tpot["mean"]) * load.prefill.mean / np.asarray(steps.attention_dp)
    parts = steps.terms(1.0 + np.asarray(found.decoding), load.context_tokens, tokens, load.prompt_tokens)
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
        if np.isfinite(per_user[row, column])
    ]


def _front(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    order = np.lexsort((-other, -one))
    best = np.maximum.accumulate(other[order])
    is_new = np.concatenate([[True], other[order][1:] > best[:-1]])
    result = np.zeros(len(one), bool)
    result[order[is_new]] = True
    return result


def _same(one: Any, other: Any) -> bool:
    return bool(replace(one, replicas=1) == replace(other, replicas=1))
