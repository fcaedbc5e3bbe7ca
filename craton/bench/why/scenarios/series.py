"""Metrics of simulated machines, imported into a real Prometheus: its queries are part of the benchmark.

All worlds share one moment and one server, with different node names. Every query runs once, and its rows go to the
world of their nodes.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from craton.agent.processes import free_port
from craton.bench.why.scenarios.world import COUNTER_SECONDS, Signal, World
from craton.observability.diagnosis.collect import queries
from craton.observability.prometheus import find_program, start_prometheus

EVERY_SECONDS = 30.0
GAUGE_SAMPLES = 5
HISTORY_SECONDS, HISTORY_SAMPLES = 6 * 3600.0, 24  # for metrics that are compared with their past
BLOCK_SECONDS = 7200  # of a Prometheus block: one import per block
WITH_HISTORY = ("craton_lustre_requests_total", "craton_lustre_request_seconds_total")
Rows = list[dict[str, Any]]
Ask = Callable[[str], Rows]


def good_moment(now: float) -> float:
    """Return a moment with the preceding quarter of an hour in one block."""
    return now // BLOCK_SECONDS * BLOCK_SECONDS - 30.0


@contextmanager
def served(folder: Path, worlds: Mapping[str, tuple[World, float]], moment: float) -> Iterator[Callable[[World], Ask]]:
    """Serve a Prometheus with these worlds, each with the seconds for which it has been slow."""
    newest: dict[str, list[str]] = {}
    older: dict[str, list[str]] = {}
    for world, lasting in worlds.values():
        for (metric, node, labels), signal in world.signals.items() if world.is_measured else ():
            text = ",".join(f'{key}="{value}"' for key, value in (("node", node), *labels))
            chance = random.Random(f"{metric}{node}{text}")
            lines = newest.setdefault(metric, [])
            for at, value in _samples(signal, lasting, chance):
                lines.append(f"{metric}{{{text}}} {value:.10g} {moment + at:.3f}")
            if metric in WITH_HISTORY:
                lines = older.setdefault(metric, [])
                for at, value in _history(signal):
                    lines.append(f"{metric}{{{text}}} {value:.10g} {moment + at:.3f}")
    data = folder / "prometheus"
    data.mkdir(parents=True)
    (folder / "prometheus.yml").write_text("global: {}\n", encoding="utf-8")
    for name, series in (("newest", newest), ("older", older)):
        _import(folder / f"{name}.txt", series, data)
    service = start_prometheus(folder, "127.0.0.1", free_port())
    try:
        by_query: dict[str, dict[str, Rows]] = {}
        for query in queries():
            rows: dict[str, Rows] = {}
            expression = " ".join(query.expression.split())
            answer = service.ask("/api/v1/query", query=expression, time=f"{moment:.3f}")
            for row in answer["data"]["result"]:
                rows.setdefault(str(row["metric"].get("node")), []).append(row)
            by_query[query.expression] = rows

        def ask_for(world: World) -> Ask:
            return lambda expression: [
                row for node in world.nodes for row in by_query.get(expression, {}).get(node, ())
            ]

        yield ask_for
    finally:
        service.end()


def _samples(signal: Signal, lasting: float, chance: random.Random) -> Iterator[tuple[float, float]]:
    """Yield (seconds from now, value), oldest first; a counter is the integral of its rate."""
    onset = -(signal.onset_seconds if signal.onset_seconds is not None else lasting)
    if not signal.is_counter:
        for number in range(GAUGE_SAMPLES):
            at = (number - GAUGE_SAMPLES + 1) * EVERY_SECONDS
            level = signal.last if at >= onset else signal.before
            yield at, level * (1.0 + chance.gauss(0.0, signal.swing)) if signal.swing else level
        return
    value = signal.total if signal.total is not None else 1e5 * signal.before
    value += HISTORY_SECONDS * signal.before
    at = -COUNTER_SECONDS
    has_burst = False
    while at <= 0.0:
        yield at, value
        rate = signal.last if at >= onset else signal.before
        value += rate * EVERY_SECONDS * (max(0.0, 1.0 + chance.gauss(0.0, signal.swing)) if signal.swing else 1.0)
        at += EVERY_SECONDS
        if at >= onset and not has_burst:
            value, has_burst = value + signal.burst, True


def _history(signal: Signal) -> Iterator[tuple[float, float]]:
    start = signal.total if signal.total is not None else 1e5 * signal.before
    for number in range(HISTORY_SAMPLES):
        passed = HISTORY_SECONDS * number / HISTORY_SAMPLES
        yield passed - HISTORY_SECONDS - COUNTER_SECONDS, start + signal.before * passed


def _import(path: Path, series: Mapping[str, list[str]], data: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for metric, lines in series.items():
            file.write(f"# TYPE {metric} unknown\n" + "\n".join(lines) + "\n")
        file.write("# EOF\n")
    command = [
        find_program(("promtool",)),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "--quiet",
        str(path),
        str(data),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
