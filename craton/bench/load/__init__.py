"""Load generator for servers with an OpenAI-compatible API: requests, arrival times, latencies and throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.load.benchmark import LoadSettings, LoadWorkload, bench_serve
    from craton.bench.load.endpoint import LoadTarget
    from craton.bench.load.lengths import parse_lengths
    from craton.bench.load.load import Closed, Limit, Open, Sweep, Timed, parse_sweep
    from craton.bench.load.requests import Prefixes
    from craton.bench.load.samples import parse_objectives
    from craton.bench.load.trace import load_trace
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
