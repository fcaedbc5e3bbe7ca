"""Disaggregated serving: a pool of prefill replicas that sends KV caches to a pool of decode replicas.

The prefill pool is a queue of several servers; decode is an open load without prompts. TTFT includes the transfer of
the KV cache, because the decode replica streams the first token too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from craton.infrastructure import Cluster
from craton.planning.rates import MachineRates, point_to_point_seconds
from craton.planning.serving.layout import ServedLayout
from craton.planning.serving.load import (
    PERCENTILES,
    ServedLoad,
    delayed_percentiles,
    multiserver_wait_seconds,
    waiting_probability,
)
from craton.planning.serving.search.evaluate import Limits, evaluate, largest_load, slowdowns, widened
from craton.planning.serving.search.replicas import ServedCandidates
from craton.planning.serving.search.result import CURVE_SHARES, STATISTICS, CurvePoint, Deployment, Interval
from craton.planning.serving.search.rows import deployment_rows, latency_intervals, missed, nodes_of

UTILIZATION = 0.9  # of a prefill pool, at most
MORE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16])  # replicas beyond the fewest that keep up
MILLION = 1e6


def pooled_deployment(
    candidates: ServedCandidates,
    cluster: Cluster,
    machine: MachineRates,
    load: ServedLoad,
    limits: Limits,
) -> Deployment | None:
    """Return the pools with the fewest GPUs that keep the limits, or come nearest; None without room for the load."""
    assert load.rate is not None
    longest = load.input.longest + load.output.longest
    per_rank = np.asarray(candidates.terms.kv_tokens) / np.asarray(candidates.terms.attention_dp)
    keep = [index for index in range(len(candidates)) if per_rank[index] >= longest]
    if not keep:
        return None
    candidates = candidates.only(keep)
    sizes = np.array([layout.replica_gpus for layout in candidates.layouts])
    decode = candidates.without_prefill()
    decode_limits = {name: limit for name, limit in limits.items() if name[0] == "tpot"}
    most = largest_load(decode, load, decode_limits)
    usable = np.where(most > 0.0, most, largest_load(decode, load, {})) * (1.0 if decode_limits else UTILIZATION)
    decode_replicas = np.maximum(np.ceil(load.rate / usable - 1e-9), 1).astype(int)
    cost = np.where(most > 0.0, 1.0, 1e3) * decode_replicas * sizes
    chosen = int(np.argmin(cost))
    pool = _prefill_pool(candidates, load, limits, sizes)
    if pool is None:
        return None
    index, count = pool
    prefill_layout = replace(candidates.layouts[index], replicas=count)
    only = decode.only([chosen])
    replicas = decode_replicas[[chosen]]
    row = deployment_rows(only, cluster, load, limits, replicas, most[[chosen]], evaluate(only, load, replicas))[0]
    total = prefill_layout.gpus + row.layout.gpus
    # Any prefill replica sends to any decode replica: beyond one domain, some of them over the network.
    is_near = total <= machine.network.nvlink_domain
    # A prompt's cache is that of one attention-data-parallel rank.
    shards = min(each.replica_gpus // each.attention_dp for each in (prefill_layout, row.layout))
    cached = candidates.kv_bytes_per_token * load.input.mean
    transfer = point_to_point_seconds(cached / shards, is_near, machine.network)
    service = _services(candidates.only([index]), load) * slowdowns(candidates)[:, :, None]
    capacity = [prefill_layout.replicas * prefill_layout.attention_dp / float(each.mean()) for each in service]
    nominal, fast, slow = capacity
    prefill_limits = nominal < row.max_rate.value
    first = _first_token(candidates.only([index]), load, count, transfer)
    mean_decode = row.tpot["mean"]
    e2e = {
        name: Interval(*(first[name][end] + load.decode_steps * row.tpot[name][end] for end in range(3)))
        for name in STATISTICS
    }
    tables = {"ttft": first, "tpot": row.tpot, "e2e": e2e}
    node_gpus = cluster.instance.num_gpus
    share_nodes = max(prefill_layout.replica_gpus, row.layout.replica_gpus) <= node_gpus
    nodes = math.ceil(total / node_gpus) if share_nodes else nodes_of(prefill_layout, node_gpus) + row.nodes
    price = cluster.price.dollars_per_hour * nodes if cluster.price else None
    share = prefill_layout.gpus / total
    per_request = price / 3600.0 / row.rate if price and row.rate else None
    tokens = row.tokens_per_second
    return replace(
        row,
        prefill=prefill_layout,
        gpus=total,
        nodes=nodes,
        max_rate=Interval(nominal, slow, fast) if prefill_limits else row.max_rate,
        limit="prefill" if prefill_limits else row.limit,
        slo_rate=min(row.slo_rate, UTILIZATION * nominal),
        ttft=first,
        e2e=e2e,
        misses=missed(tables, limits),
        prefill_share=share,
        tokens_per_second_per_gpu=Interval(*(value / total for value in tokens)),
        tokens_per_second_per_user=Interval(1 / mean_decode.value, 1 / mean_decode.high, 1 / mean_decode.low),
        dollars_per_hour=price,
        dollars_per_million_input=_fixed(per_request, share, load.input.mean),
        dollars_per_million_output=_fixed(per_request, 1.0 - share, load.output.mean),
        kv_transfer_seconds=transfer,
        kv_transfer_link=machine.near_link if is_near else machine.far_link,
    )


def pooled_curve(candidates: ServedCandidates, load: ServedLoad, chosen: Deployment) -> list[CurvePoint]:
    """Return the latencies of chosen pools at other rates."""
    assert chosen.prefill is not None
    prefill, decode = (_only(candidates, layout) for layout in (chosen.prefill, chosen.layout))
    decode, count = decode.without_prefill(), np.array([chosen.layout.replicas])
    points = []
    for rate in np.array(CURVE_SHARES) * chosen.max_rate.value:
        at_rate = replace(load, rate=float(rate))
        first = _first_token(prefill, at_rate, chosen.prefill.replicas, chosen.kv_transfer_seconds or 0.0)
        tpot = evaluate(decode, at_rate, count).latencies.tpot
        points.append(
            CurvePoint(
                float(rate),
                first,
                latency_intervals(tpot, 0),
            )
        )
    return points


def _only(candidates: ServedCandidates, layout: ServedLayout) -> ServedCandidates:
    return candidates.only([candidates.layouts.index(replace(layout, replicas=1))])


def _fixed(dollars: float | None, share: float, tokens: float) -> Interval | None:
    if dollars is None:
        return None
    value = dollars * share / tokens * MILLION
    return Interval(value, value, value)


def _prefill_pool(
    candidates: ServedCandidates, load: ServedLoad, limits: Limits, sizes: np.ndarray
) -> tuple[int, int] | None:
    """Return the layout and the replicas of the smallest prefill pool that keeps the limits of TTFT, else of the one
    that is nearest."""
    service = _services(candidates, load) * slowdowns(candidates)[0]
    ranks = np.asarray(candidates.terms.attention_dp)
    fewest = np.ceil(load.rate * service.mean(axis=0) / UTILIZATION / ranks)
    counts = np.maximum(fewest, 1) + MORE.reshape(-1, 1)
    table = _queue(service, load, counts * ranks, candidates.replica.first_token_seconds)
    wanted = {name[1]: limit for name, limit in limits.items() if name[0] == "ttft"}
    worst = np.max([table[name] / limit for name, limit in wanted.items()] or [np.zeros_like(counts)], axis=0)
    cost = counts * sizes + np.where(worst > 1.0, 1e6 * worst, 0.0)
    if not np.isfinite(cost).any():
        return None
    row, column = np.unravel_index(int(np.nanargmin(cost)), cost.shape)
    return int(column), int(counts[row, column])


def _first_token(
    candidates: ServedCandidates, load: ServedLoad, count: int, transfer_seconds: float
) -> dict[str, Interval]:
    factors = slowdowns(candidates)
    service, ranks = _services(candidates, load)[:, None, :] * factors, np.asarray(candidates.terms.attention_dp)
    table = _queue(service, load, count * ranks, candidates.replica.first_token_seconds)
    return latency_intervals({name: widened(candidates, table[name]) + transfer_seconds for name in STATISTICS}, 0)


def _services(candidates: ServedCandidates, load: ServedLoad) -> np.ndarray:
    """Return prefill seconds of every length, alone on a replica: [lengths, candidates]."""
    lengths = load.prefill.array.reshape(-1, 1)
    cached = load.prefix_hits * load.input.array.reshape(-1, 1)
    return np.asarray(candidates.replica.steps.prefill_seconds(lengths, cached))


def _queue(service: np.ndarray, load: ServedLoad, servers: Any, outside: Any) -> dict[str, Any]:
    """Return the statistics of TTFT in front of `servers`."""
    mean, variance = service.mean(axis=0), service.var(axis=0)
    used = load.rate * mean / servers
    variability = 0.5 * (load.burstiness + variance / mean**2)
    wait = multiserver_wait_seconds(servers, used, mean, variability)
    delayed = np.maximum(waiting_probability(servers, used), 1e-9)
    whole = np.where(used < 1.0, mean + wait, np.inf)
    percentiles = delayed_percentiles(mean + 0.0 * wait, variance + 0.0 * wait, delayed, wait / delayed)
    percentiles = np.where(used < 1.0, percentiles, np.inf)
    named = {"mean": whole, **dict(zip(PERCENTILES, percentiles, strict=True))}
    return {name: outside + each for name, each in named.items()}
