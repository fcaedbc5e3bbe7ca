"""The client must not be what is measured: a piece of an answer costs it few calls."""

from __future__ import annotations

from counted_calls import counted_calls
from fast_server import fast_server

from craton.bench.load import Closed, Limit, LoadSettings, LoadTarget, LoadWorkload, bench_serve
from craton.bench.load.lengths import Lengths

STREAMS, REQUESTS = 8, 16


def calls_of(pieces: int) -> int:
    """The calls of a whole load test whose answers have so many pieces, each sent in a write of its own."""
    with fast_server(pieces, ticks_per_second=400) as (_, url):
        workload = LoadWorkload(Lengths("fixed", 16), Lengths("fixed", pieces))
        settings = LoadSettings(LoadTarget(url), workload, Closed(STREAMS), Limit(requests=REQUESTS))
        with counted_calls(of_threads=True) as calls:
            level = bench_serve(settings).shown
    assert level.summary.failed == 0
    assert sum(len(sample.chunk_seconds) for sample in level.samples) == pieces * REQUESTS
    return calls.number


def test_a_piece_costs_few_calls() -> None:
    of_a_piece = (calls_of(200) - calls_of(50)) / (150 * REQUESTS)
    assert of_a_piece < 90  # half as many again as today
