"""Ten times what a server can do, for a minute: it refuses what it cannot take, and serves the others as before."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
import requests
from live_server import Server, make_model, serving
from waiting import PATIENCE_SECONDS

from craton.bench.load import Closed, Limit, LoadSettings, LoadTarget, LoadWorkload, Open, bench_serve, parse_lengths

OVERLOAD_SECONDS = 60.0


def load(server: Server, load: Closed | Open, limit: Limit) -> LoadSettings:
    workload = LoadWorkload(parse_lengths("20..60", "input"), parse_lengths("120", "output"), vocabulary=250)
    return LoadSettings(LoadTarget(server.url, ignore_eos=True), workload, load, limit)


def memory_bytes(server: Server) -> int:
    """Of the first rank and the front end, which is its child."""
    rank = psutil.Process(server.rank_pids()[0])
    return sum(process.memory_info().rss for process in (rank, *rank.children(recursive=True)))


@pytest.mark.slow
def test_ten_times_the_load_for_a_minute(tmp_path: Path) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    make_model(folder, 1)
    with serving(folder, tmp_path, "overloaded", more=", max_running: 16, max_waiting: 32") as server:
        calm = bench_serve(load(server, Closed(16), Limit(seconds=10))).shown.summary
        before = memory_bytes(server)
        answered = [0]
        largest = [0]
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.5):
                assert requests.get(f"{server.url}/health", timeout=PATIENCE_SECONDS).status_code == 200
                answered[0] += 1
                largest[0] = max(largest[0], memory_bytes(server))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            rate = 10 * calm.requests_per_second
            loaded = bench_serve(load(server, Open(rate), Limit(seconds=OVERLOAD_SECONDS))).shown.summary
        finally:
            is_over.set()
            watcher.join()
        print(f"calm {calm.requests_per_second:.1f}/s, asked {rate:.0f}/s, answered {loaded.requests_per_second:.1f}/s")
        print(f"first token {loaded.ttft_seconds}, memory {before} to {largest[0]} bytes")
        assert answered[0] > 1, "health was answered meanwhile"
        assert largest[0] < 1.5 * before
        assert {failure.kind for failure in loaded.failures} == {"HTTP 429"}, loaded.failures
        assert loaded.ttft_seconds is not None, "requests were answered meanwhile"
