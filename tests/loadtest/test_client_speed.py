"""The client must not be what is measured: a piece costs it about three times what reading its JSON costs."""

from __future__ import annotations

import json
import time

import pytest
from fast_server import EVENT, fast_server

from craton.loadtest import Closed, Lengths, Limit, Settings, Target, Workload, bench_serve

PIECES, STREAMS, REQUESTS = 200, 64, 192
MOST_PARSES = 7  # of the JSON of a piece, that the whole piece may cost


@pytest.mark.slow
def test_a_piece_costs_less_than_reading_its_json_seven_times() -> None:
    """Both counted in processor time, so that whoever else is on this machine does not matter much."""
    with fast_server(PIECES, ticks_per_second=400) as (_, url):
        workload = Workload(Lengths("fixed", 16), Lengths("fixed", PIECES))
        report = bench_serve(Settings(Target(url), workload, Closed(STREAMS), Limit(requests=REQUESTS)))
    level = report.shown
    assert level.summary.failed == 0
    assert sum(len(sample.chunk_seconds) for sample in level.samples) == PIECES * REQUESTS
    cpu_seconds = level.busy * level.summary.duration_seconds
    began = time.process_time()
    for _ in range(PIECES * REQUESTS):
        json.loads(EVENT.removeprefix(b"data: "))
    assert cpu_seconds < MOST_PARSES * (time.process_time() - began)
