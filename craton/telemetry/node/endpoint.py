"""The Prometheus endpoint of a node: the newest value of every metric, with the labels run, node, rank and leaf.

The agent serves it from a background thread; prometheus-client is imported on demand. User metrics (outside the
vocabulary) are served as gauges, up to MAX_OWN_METRICS names, and as many labels of a metric, so that a job that
generates names cannot flood the time series database.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from craton.telemetry.rank import LEDGER_KINDS
from craton.telemetry.vocabulary import METRICS, PREFIX, Metric, split_label

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

MAX_OWN_METRICS = 100
MAX_CONNECTIONS = 64  # at a time
REQUEST_SECONDS = 10.0  # timeout of a request
LEDGER_METRIC = "run_ledger_seconds"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class MetricsEndpoint:
    """`http://ADDRESS:PORT/metrics` for one node."""

    def __init__(self, run: str, node: str, leaf: str = "") -> None:
        self._run, self._node, self._leaf = run, node, leaf
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._debts: dict[tuple[str, ...], float] = {}  # ledger seconds that were taken back
        self._own_names: set[str] = set()
        self._lock = threading.Lock()
        self._server: Any = None

    def serve(self, port: int, address: str) -> int:
        """Start serving and return the port (0 requests any free one). OSError if it is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, _ = start_http_server(port, addr=address, registry=registry)
        _bound_connections(self._server)
        return int(self._server.server_port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def update(self, values: Mapping[str, Any], rank: int | None) -> None:
        """Set values of a rank; rank None is the node's agent. A value of None was not a number: NaN."""
        labels = ("" if rank is None else str(rank),)
        with self._lock:
            for name, value in values.items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    continue
                if (labelled := split_label(name)) is not None:
                    base, label = labelled
                    known = self._values.setdefault(base, {})
                    if (*labels, label) in known or len(known) < MAX_OWN_METRICS:
                        known[*labels, label] = float("nan") if value is None else float(value)
                elif name in METRICS or self._admit(name):
                    self._values.setdefault(name, {})[labels] = float("nan") if value is None else float(value)

    def book(self, seconds_by_kind: Mapping[str, float], rank: int) -> None:
        """Add ledger seconds of a rank. Seconds taken back from a kind (an interrupted step) are subtracted from the
        next seconds of that kind: to Prometheus, a decreasing counter looks like a reset."""
        with self._lock:
            booked = self._values.setdefault(LEDGER_METRIC, {})
            for kind in LEDGER_KINDS:  # from zero: Prometheus sees no increase of a new series
                booked.setdefault((str(rank), kind), 0.0)
            for kind, seconds in seconds_by_kind.items():
                labels = (str(rank), kind)
                paid = seconds - self._debts.pop(labels, 0.0)
                if paid < 0:
                    self._debts[labels] = -paid
                booked[labels] = booked.get(labels, 0.0) + max(0.0, paid)

    def set_labelled(self, name: str, value_by_label: Mapping[str, float]) -> None:
        """Set values of a run-wide metric that has an additional label."""
        assert METRICS[name].label, name
        with self._lock:
            self._values.setdefault(name, {}).update({("", label): value for label, value in value_by_label.items()})

    def forget(self, name: str) -> None:
        """Remove a metric from this endpoint."""
        with self._lock:
            self._values.pop(name, None)

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Remove the values of ranks that are no longer on this node, except their ledger."""
        kept = {"", *map(str, ranks)}
        with self._lock:
            for name, values in self._values.items():
                if name != LEDGER_METRIC:
                    for labels in [labels for labels in values if labels[0] not in kept]:
                        del values[labels]

    def collect(self) -> Iterator[Family]:
        """Yield the metric families; prometheus-client calls it at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            snapshot = {name: dict(values) for name, values in self._values.items()}
        for name, values in sorted(snapshot.items()):
            metric = METRICS.get(name) or Metric(name, "1", "Recorded by the job's own code", "gauge", "rank")
            label_names = ["run", "node", "leaf", "rank", *([metric.label] if metric.label else [])]
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + name, f"{metric.help} ({metric.unit})", labels=label_names)
            for labels, value in _in_order(values.items()):
                family.add_metric([self._run, self._node, self._leaf, *labels], value)
            yield family

    def _admit(self, name: str) -> bool:
        if name in self._own_names:
            return True
        if not _NAME.fullmatch(name) or len(self._own_names) >= MAX_OWN_METRICS:
            return False
        self._own_names.add(name)
        return True


def _in_order(items: Iterable[tuple[tuple[str, ...], float]]) -> list[tuple[tuple[str, ...], float]]:
    return sorted(items, key=lambda item: (len(item[0][0]), item[0]))


def _bound_connections(server: Any) -> None:
    """Limit the number of connections and close idle ones: each uses a thread and a descriptor of the agent."""
    free = threading.Semaphore(MAX_CONNECTIONS)

    class Handler(server.RequestHandlerClass):
        timeout = REQUEST_SECONDS

        def __init__(self, *arguments: Any) -> None:
            try:
                with contextlib.suppress(OSError):  # the client disconnected, or sent no request in time
                    super().__init__(*arguments)
            finally:
                free.release()

    server.RequestHandlerClass = Handler
    server.verify_request = lambda request, address: free.acquire(blocking=False)
