"""Current and recent metrics of a server from its own /metrics: latencies, queue, KV cache.

Its recorded metrics, from before the page was opened and after it is gone, are in recorded_looks.py. Latencies are of
the requests of the last minute (the difference of two histograms), so that a recent problem does not hide in a day's
median. Metric names are vLLM's, which other engines use too.
"""

from __future__ import annotations

import http.client
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from craton.orchestration import ServerAddress, histogram_quantile

ANSWER_SECONDS = 2.0
RATE_SECONDS = 10.0
LATE_SECONDS = 60.0
MAX_BYTES = 4 << 20
KEPT_LOOKS = 300
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_share": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "prompted": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}
HISTOGRAMS = {
    "first_token": "vllm:time_to_first_token_seconds",
    "inter_token": "vllm:inter_token_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "request": "vllm:e2e_request_latency_seconds",
}
LATENCIES = {"first_token": "time to first token", "inter_token": "inter-token latency", "queue": "queue time"}

Buckets = dict[float, float]  # upper bound in seconds → cumulative count


@dataclass(frozen=True)
class Scrape:
    """One scrape of a server."""

    moment: float
    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, Buckets]


@dataclass(frozen=True)
class ServerLook:
    """Metrics of a server at one moment; None: not known."""

    time: float  # epoch seconds
    running: int
    waiting: int
    kv_share: float | None
    tokens_per_second: float | None
    prefix_hit_share: float | None
    preemptions: int
    quantiles: dict[str, tuple[float | None, float | None]]  # HISTOGRAMS → median and 95th percentile


@dataclass
class ServerLooks:
    """Scrape one server repeatedly."""

    address: ServerAddress
    history: deque[ServerLook] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))
    _scrapes: deque[Scrape] = field(default_factory=deque)

    def look(self) -> ServerLook | None:
        """Scrape the server; None when it does not answer."""
        text = _get_metrics(self.address)
        return None if text is None else self.take(text, time.time())

    def take(self, text: str, moment: float) -> ServerLook:
        new = parse_metrics(text, moment)
        last = self._scrapes[-1] if self._scrapes else None
        if last is not None and new.counters.get("generated", 0.0) < last.counters.get("generated", 0.0):
            self._scrapes.clear()  # it was restarted
        self._scrapes.append(new)
        while moment - self._scrapes[0].moment > LATE_SECONDS:
            self._scrapes.popleft()
        recent = next(scrape for scrape in self._scrapes if moment - scrape.moment <= RATE_SECONDS)
        seconds = moment - recent.moment
        generated = new.counters.get("generated", 0.0) - recent.counters.get("generated", 0.0)
        queries = new.counters.get("prefix_queries", 0.0)
        server_look = ServerLook(
            time=moment,
            running=int(new.gauges.get("running", 0)),
            waiting=int(new.gauges.get("waiting", 0)),
            kv_share=new.gauges.get("kv_share"),
            tokens_per_second=generated / seconds if seconds > 0 else None,
            prefix_hit_share=new.counters.get("prefix_hits", 0.0) / queries if queries else None,
            preemptions=int(new.counters.get("preemptions", 0)),
            quantiles={name: self._quantiles(name, new) for name in HISTOGRAMS if name in new.histograms},
        )
        self.history.append(server_look)
        return server_look

    def _quantiles(self, name: str, new: Scrape) -> tuple[float | None, float | None]:
        """Return the quantiles of the last minute; None without requests."""
        before = self._scrapes[0].histograms.get(name, {})
        buckets = {bound: count - before.get(bound, 0.0) for bound, count in new.histograms[name].items()}
        ordered = sorted(buckets.items())
        return histogram_quantile(ordered, 0.5), histogram_quantile(ordered, 0.95)


def look_curves(looks: Sequence[ServerLook]) -> dict[str, Any]:
    """Return the data that the page draws, over the seconds before the last scrape."""
    if not looks:
        return {}
    end = looks[-1].time
    values: dict[str, list[float | None]] = {
        "tokens_per_second": [look.tokens_per_second for look in looks],
        "running": [look.running for look in looks],
        "waiting": [look.waiting for look in looks],
        "kv_share": [look.kv_share for look in looks],
    }
    for name in LATENCIES:
        values[f"{name}_median"] = [look.quantiles.get(name, (None, None))[0] for look in looks]
        values[f"{name}_p95"] = [look.quantiles.get(name, (None, None))[1] for look in looks]
    return {"seconds": [round(look.time - end, 1) for look in looks], "values": values}


def parse_metrics(text: str, moment: float) -> Scrape:
    """Parse metrics, summed over models and engines; unknown ones are skipped."""
    from prometheus_client.parser import text_string_to_metric_families

    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    histograms: dict[str, Buckets] = {}
    gauge_names = {name: key for key, name in GAUGES.items()}
    counter_names = {name: key for key, name in COUNTERS.items()}
    bucket_names = {f"{name}_bucket": key for key, name in HISTOGRAMS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if key := gauge_names.get(sample.name):
                before = gauges.get(key, 0.0)
                # Shares cannot be summed: take the fullest engine, which makes requests wait.
                gauges[key] = max(before, sample.value) if key == "kv_share" else before + sample.value
            elif key := counter_names.get(sample.name):
                counters[key] = counters.get(key, 0.0) + sample.value
            elif key := bucket_names.get(sample.name):
                bound = float(sample.labels["le"])
                buckets = histograms.setdefault(key, {})
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return Scrape(moment, gauges, counters, histograms)


def _get_metrics(address: ServerAddress) -> str | None:
    connection = http.client.HTTPConnection(address.reached_at, address.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read(MAX_BYTES).decode("utf-8", errors="replace")
        return text if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
