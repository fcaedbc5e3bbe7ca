"""Percentiles of closed loads, and the start burst of a benchmark, against a simulation of the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from serving_simulator import CLOSED_CASES, LinearSteps, closed_requests

from craton.planning.serving.closed_load import closed_loop
from craton.planning.serving.load import ServedLoad, ServedReplica, TokenLengths, closed_latencies
from craton.planning.serving.load.closed_tail import ClosedLatencies

VARIED = [name for name in CLOSED_CASES if name != "one length, 1,024 + 128"]
PERCENTILES = ("p50", "p95", "p99")


def predicted(server: LinearSteps, load: ServedLoad, users: int, burst_share: float = 0.0) -> ClosedLatencies:
    waves = float(load.output.variance == 0.0)
    loop = closed_loop(server, float(users), load.input.mean, load.output.mean, waves=waves)  # type: ignore[arg-type]
    return closed_latencies(ServedReplica(server), load, float(users), loop, burst_share)


@pytest.mark.parametrize("users", [16, 64])
@pytest.mark.parametrize("name", VARIED)
def test_percentiles_are_those_of_a_simulated_scheduler(name: str, users: int) -> None:
    server, load = CLOSED_CASES[name]
    found = closed_requests(server, load, users, 2500, 1)
    closed, window = predicted(server, load, users), slice(6 * users, 2400)
    for latency, seconds, mean_bound, bound in (
        (closed.ttft, found.ttft_seconds[window], 1.15, 1.45),
        (closed.tpot, found.tpot_seconds[window], 1.03, 1.05),
    ):
        assert 1 / mean_bound < latency["mean"] / seconds.mean() < mean_bound
        ratios = {key: float(latency[key] / np.percentile(seconds, int(key[1:]))) for key in PERCENTILES}
        assert all(1 / bound < ratio < bound for ratio in ratios.values()), ratios


@pytest.mark.parametrize("rounds", [2, 10])
@pytest.mark.parametrize("name", CLOSED_CASES)
def test_a_benchmark_begins_with_all_users_at_once(name: str, rounds: int) -> None:
    server, load = CLOSED_CASES[name]
    seconds = closed_requests(server, load, 64, 64 * rounds, 1).ttft_seconds
    ttft = predicted(server, load, 64, 1 / rounds).ttft
    assert 1 / 1.25 < ttft["p95"] / np.percentile(seconds, 95) < 1.25
    assert 1 / 1.25 < ttft["p99"] / np.percentile(seconds, 99) < 1.25
    if name in VARIED:
        assert 1 / 1.2 < ttft["mean"] / seconds.mean() < 1.2


def test_a_lone_user_waits_for_no_one() -> None:
    load = ServedLoad(TokenLengths.fixed(1024), TokenLengths.fixed(128))
    server = LinearSteps()
    alone = server.step_seconds + 1024 * server.token_seconds
    for burst_share in (0.0, 0.1):
        ttft = predicted(server, load, 1, burst_share).ttft
        assert [float(seconds) for seconds in ttft.values()] == pytest.approx([alone] * len(ttft), rel=0.03)


def test_more_users_and_shorter_benchmarks_are_slower() -> None:
    server, load = CLOSED_CASES["lognormal, 1,024 + 256"]
    steady = [predicted(server, load, users).ttft["p95"] for users in (1, 8, 64, 512)]
    assert steady == sorted(steady)
    tails = [predicted(server, load, 64, share).ttft["p99"] for share in (0.0, 0.05, 0.5, 1.0)]
    assert tails == sorted(tails)
    for share in (0.0, 0.5):
        found = predicted(server, load, 64, share)
        for latency in (found.ttft, found.tpot, found.e2e):
            values = [float(latency[key]) for key in ("p50", "p90", "p95", "p99")]
            assert values == sorted(values)
