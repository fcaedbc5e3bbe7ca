"""The closed forms of a server's latency against a simulation of its scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_simulator import (
    FIXED,
    LOGNORMAL,
    LinearSteps,
    Simulated,
    length_table,
    open_arrivals,
    simulate,
)

from craton.planning.serving.load import LIMITS, ServedLoad, ServedReplica, TokenLengths, open_load, saturation

REQUESTS = 8000
WARM_UP = REQUESTS // 6
SERVER = LinearSteps()
NORMAL = {
    "prefill-heavy": FIXED,
    "lognormal": LOGNORMAL,
    "chunked": ServedLoad(TokenLengths.fixed(16_384), TokenLengths.fixed(128)),
}


def simulated(server: LinearSteps, load: ServedLoad, rate: float) -> Simulated:
    generator = np.random.default_rng(1)
    arrivals = open_arrivals(rate, REQUESTS, load.burstiness, generator)
    return simulate(server, arrivals, *length_table(load, REQUESTS, generator))


def ratios(predicted: dict[str, float], seconds: np.ndarray) -> dict[str, float]:
    window = seconds[WARM_UP : int(0.95 * REQUESTS)]
    found = {name: np.percentile(window, int(name[1:])) for name in predicted if name != "mean"}
    return {name: float(predicted[name] / value) for name, value in {**found, "mean": window.mean()}.items()}


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", NORMAL)
def test_latencies_are_those_of_a_simulated_scheduler(name: str, share: float) -> None:
    load = NORMAL[name]
    rate = share * float(saturation(ServedReplica(SERVER), load).rate)
    latencies = open_load(ServedReplica(SERVER), load, rate)
    found = simulated(SERVER, load, rate)
    ttft = ratios(latencies.ttft, found.ttft_seconds)
    assert ttft["mean"] == pytest.approx(1.0, abs=0.1)
    assert all(1 / 1.3 < ttft[percentile] < 1.3 for percentile in ("p50", "p90", "p95", "p99")), ttft
    if name != "chunked":
        tpot = ratios(latencies.tpot, found.tpot_seconds)
        assert tpot["mean"] == pytest.approx(1.0, abs=0.06)
        assert all(1 / 1.2 < ratio < 1.2 for ratio in tpot.values()), tpot


def test_bursts_make_requests_wait() -> None:
    load = replace(NORMAL["prefill-heavy"], burstiness=4.0)
    rate = 0.7 * float(saturation(ServedReplica(SERVER), load).rate)
    ttft = ratios(open_load(ServedReplica(SERVER), load, rate).ttft, simulated(SERVER, load, rate).ttft_seconds)
    assert all(1 / 1.35 < ratio < 1.35 for ratio in ttft.values()), ttft


def test_the_kv_cache_limits_what_a_simulated_server_completes() -> None:
    server = replace(SERVER, kv_tokens=60_000)
    load = ServedLoad(TokenLengths.fixed(1024), TokenLengths.lognormal_of_spread(512, 0.6))
    limit = saturation(ServedReplica(replace(server, kv_tokens=54_000)), load)
    assert LIMITS[int(limit.limit)] == "KV cache"
    completed = simulated(server, load, 3 * float(limit.rate)).completed_per_second
    assert float(limit.rate) == pytest.approx(completed, rel=0.05)
