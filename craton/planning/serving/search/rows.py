"""Deployments from the arrays of an evaluation: numbers with intervals, dollars, limits that are missed, bottleneck.

Dollars are those of whole nodes. They are split into input and output tokens by the time that prefill and decode take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from craton.infrastructure import Cluster
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.load import LIMITS, ServedLoad
from craton.planning.serving.search.evaluate import Evaluated, Limits
from craton.planning.serving.search.replicas import ServedCandidates
from craton.planning.serving.search.result import STATISTICS, Deployment, Interval, SloMiss

MILLION = 1e6
SMALL_SHARE = 0.02  # parts of a step below this share are not shown


def deployment_rows(
    candidates: ServedCandidates,
    cluster: Cluster,
    load: ServedLoad,
    limits: Limits,
    replicas: Any,
    slo_load: Any,
    found: Evaluated,
) -> list[Deployment]:
    """Return one row per candidate."""
    steps, latencies = candidates.replica.steps, found.latencies
    saturation = latencies.saturation
    count = np.asarray(replicas, float)
    served = np.minimum(found.rate, saturation.rate) * count
    tpot = np.broadcast_to(latencies.tpot["mean"], (3, len(candidates)))[0]
    alone = (
        np.broadcast_to(latencies.decoding, served.shape)[0] if np.ndim(latencies.decoding) > 1 else latencies.decoding
    )
    shares = _step_shares(candidates, load, alone, served[0] / count, tpot)
    rows = []
    for index, layout in enumerate(candidates.layouts):
        layout = ServedLayout(layout.tp, layout.pp, layout.ep, layout.attention_dp, int(count[index]))
        nodes = nodes_of(layout, cluster.instance.num_gpus)
        price = cluster.price.dollars_per_hour * nodes if cluster.price else None
        rate = _interval(served, index, upward=True)
        rates = [float(_at(served, end, index)) for end in range(3)]
        shares_of_prefill = [float(np.clip(_at(latencies.prefill_share, end, index), 0.0, 1.0)) for end in range(3)]
        tables = {name: latency_intervals(getattr(latencies, name), index) for name in ("ttft", "tpot", "e2e")}
        kv_tokens = float(_at(steps.kv_tokens, 0, index)) * layout.replicas
        running = float(_at(steps.max_running, 0, index)) * layout.replicas
        output = load.output.mean
        tokens = Interval(*(value * output for value in rate))
        user = tables["tpot"]["mean"]
        decoding = float(_at(latencies.decoding, 0, index))
        rows.append(
            Deployment(
                instance=cluster.instance.name,
                gpu=cluster.instance.gpu.name,
                layout=layout,
                prefill=None,
                gpus=layout.gpus,
                nodes=nodes,
                rate=rate.value,
                max_rate=_interval(saturation.rate * count, index, upward=True),
                slo_rate=float(slo_load[index]) * layout.replicas,
                limit=LIMITS[int(np.ravel(saturation.limit)[index % np.size(saturation.limit)])],
                bottleneck=shares[index],
                ttft=tables["ttft"],
                tpot=tables["tpot"],
                e2e=tables["e2e"],
                decoding=decoding * layout.replicas,
                kv_tokens=kv_tokens,
                max_concurrency=int(min(running, kv_tokens / load.context_tokens)),
                prefill_share=shares_of_prefill[0],
                tokens_per_second=tokens,
                tokens_per_second_per_gpu=Interval(*(value / layout.gpus for value in tokens)),
                tokens_per_second_per_user=Interval(1.0 / user.value, 1.0 / user.high, 1.0 / user.low),
                dollars_per_hour=price,
                dollars_per_million_input=_dollars(price, shares_of_prefill, rates, load.input.mean),
                dollars_per_million_output=_dollars(price, [1.0 - share for share in shares_of_prefill], rates, output),
                misses=missed(tables, limits),
            )
        )
    return rows


def nodes_of(layout: ServedLayout, node_gpus: int) -> int:
    """Return the nodes for all replicas; one that needs less than a node shares it with others, whole."""
    if layout.replica_gpus > node_gpus:
        return layout.replicas * math.ceil(layout.replica_gpus / node_gpus)
    return math.ceil(layout.replicas / (node_gpus // layout.replica_gpus))


def latency_intervals(seconds: Mapping[str, Any], index: int) -> dict[str, Interval]:
    """Return a candidate's interval of each statistic."""
    return {key: _interval(seconds[key], index) for key in STATISTICS}


def missed(tables: dict[str, dict[str, Interval]], limits: Limits) -> tuple[SloMiss, ...]:
    found = (
        SloMiss(name, statistic, limit, tables[name][statistic].value) for (name, statistic), limit in limits.items()
    )
    return tuple(miss for miss in found if miss.value > miss.limit)


def _step_shares(
    candidates: ServedCandidates, load: ServedLoad, decoding: Any, rate: Any, tpot: Any
) -> list[dict[str, float]]:
    """Return for each candidate the parts of a mean step with their shares, largest first."""
    steps: Any = candidates.replica.steps
    tokens = rate * tpot * load.prefill.mean / np.asarray(steps.attention_dp)
    parts = steps.terms(1.0 + decoding, load.context_tokens, tokens, load.prompt_tokens)
    sizes = np.stack([np.broadcast_to(part, (len(candidates),)) for part in parts.values()])
    shares = sizes / sizes.sum(axis=0)
    order = np.argsort(-shares, axis=0)
    names = list(parts)
    return [
        {names[row]: float(shares[row, column]) for row in order[:, column] if shares[row, column] >= SMALL_SHARE}
        for column in range(len(candidates))
    ]


def _dollars(price: float | None, shares: list[float], rates: list[float], tokens: float) -> Interval | None:
    """Return dollars per million tokens of a share of the time, at `rates` requests per second of `tokens` each; both
    with nominal, fast and slow steps."""
    if price is None or not all(rates):
        return None
    ends = [price * share / 3600.0 / tokens * MILLION / rate for share, rate in zip(shares, rates, strict=True)]
    return Interval(ends[0], min(ends), max(ends))


def _at(values: Any, row: int, index: int) -> Any:
    array = np.asarray(values)
    if array.ndim == 0:
        return array
    if array.ndim == 1:
        return array[index if array.shape[0] > 1 else 0]
    return array[row if array.shape[0] > 1 else 0, index if array.shape[1] > 1 else 0]


def _interval(values: Any, index: int, *, upward: bool = False) -> Interval:
    """Return nominal, fast and slow steps as an interval; `upward`: what is larger with fast steps."""
    nominal, fast, slow = (float(_at(values, row, index)) for row in range(3))
    low, high = (slow, fast) if upward else (fast, slow)
    return Interval(nominal, min(low, nominal), max(high, nominal))
