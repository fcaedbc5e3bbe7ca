"""Where a server saturates: held against a queue whose limit is known."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from craton.bench.load import Open, Sweep, parse_objectives
from craton.bench.load.samples import RequestSample
from craton.bench.load.saturation import Saturation, keeps_up, next_rate, saturation, too_short, why_not
from craton.bench.load.summary import summarize


def queue(
    rate: float, servers: int = 8, service_seconds: float = 0.5, seconds: float = 20.0, seed: int = 0
) -> list[RequestSample]:
    """What a server with so many places would give: it sustains servers / service_seconds requests/s."""
    free = [0.0] * servers
    samples = []
    for due in islice(Open(rate).times(seed, 0), round(rate * seconds)):
        place = int(np.argmin(free))
        start = max(due, free[place])
        free[place] = start + service_seconds
        times = np.array([start + service_seconds / 2, free[place]])
        samples.append(RequestSample(due, due, free[place], times, 10, 2))
    return samples


def sweep(limit: float, low: float = 1.0, high: float = 64.0) -> dict[float, bool]:
    """The rates that a sweep tries against a server that sustains exactly `limit`."""
    tried: dict[float, bool] = {}
    while (rate := next_rate(Sweep(low, high), tried)) is not None:
        assert rate not in tried
        tried[rate] = rate <= limit
    return tried


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("rate", "expected"), [(4, True), (8, True), (12, True), (14, True), (24, False), (32, False)])
def test_keeping_up_with_a_queue_that_sustains_sixteen(rate: float, expected: bool, seed: int) -> None:
    assert keeps_up(queue(rate, seed=seed)) is expected


def test_a_load_of_nothing_keeps_up() -> None:
    assert keeps_up([])
    assert keeps_up(queue(1, seconds=1))


@pytest.mark.parametrize("seed", range(20))
def test_few_requests_are_no_alarm(seed: int) -> None:
    assert keeps_up(queue(2, seed=seed))


@pytest.mark.parametrize("limit", [1.0, 3.0, 11.3, 40.0, 63.0])
def test_a_sweep_finds_the_limit_within_a_tenth(limit: float) -> None:
    found = saturation(sweep(limit))
    assert found.sustained is not None
    assert found.too_much is not None
    assert found.sustained <= limit < found.too_much <= 1.1 * found.sustained


def test_a_sweep_doubles_and_then_closes_in() -> None:
    assert list(sweep(11.0))[:5] == [1, 2, 4, 8, 16]
    assert len(sweep(11.0)) == 8


def test_a_limit_outside_of_the_sweep() -> None:
    assert saturation(sweep(0.5)) == Saturation(None, 1.0)
    assert saturation(sweep(100.0, 1, 48)) == Saturation(48.0, None)
    assert list(sweep(100.0, 1, 48)) == [1, 2, 4, 8, 16, 32, 48]


def test_a_lucky_rate_above_a_bad_one_is_not_believed() -> None:
    assert saturation({1.0: True, 2.0: False, 4.0: True}) == Saturation(1.0, 2.0)


def test_why_a_level_did_not_go_well() -> None:
    good, full = queue(8), queue(32)
    assert why_not(good, summarize(good)) == ""
    assert why_not(full, summarize(full)) == "backlog"
    strict = parse_objectives("e2e=400ms")
    assert why_not(good, summarize(good, strict)) == "0% good"
    broken = [*good, *(RequestSample(0.0, 0.0, 1.0, error="HTTP 429") for _ in range(10))]
    assert why_not(broken, summarize(broken)) == "10 of 170 failed"


def test_a_level_may_be_too_short_to_say() -> None:
    short, long = queue(8, seconds=0.7), queue(8)
    assert too_short(short, summarize(short))
    assert not too_short(long, summarize(long))
