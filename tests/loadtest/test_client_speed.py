"""The client must not be what is measured: 20,000 pieces a second and more on one core."""

from __future__ import annotations

import pytest
from fast_server import fast_server

from craton.loadtest import Closed, Lengths, Limit, Settings, Target, Workload, bench_serve

PIECES, STREAMS, REQUESTS = 200, 64, 192
MOST_CPU_SECONDS = 1 / 20_000  # of one piece


@pytest.mark.slow
def test_a_piece_costs_less_than_fifty_microseconds() -> None:
    """Counted in processor time, so that whoever else is on this machine does not matter much."""
    with fast_server(PIECES, ticks_per_second=400) as (_, url):
        workload = Workload(Lengths("fixed", 16), Lengths("fixed", PIECES))
        report = bench_serve(Settings(Target(url), workload, Closed(STREAMS), Limit(requests=REQUESTS)))
    level = report.shown
    assert level.summary.failed == 0
    assert sum(len(sample.chunk_seconds) for sample in level.samples) == PIECES * REQUESTS
    cpu_seconds = level.busy * level.summary.duration_seconds
    assert cpu_seconds / (PIECES * REQUESTS) < MOST_CPU_SECONDS
