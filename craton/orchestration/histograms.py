"""Histograms of a server's /metrics: means, interpolated quantiles, and whether a latency surely exceeds a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Latencies by the names of `serve.slo`, and the parts of a request, which add up: queue, prefill, decode.
LATENCY_METRICS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass
class LatencyHistogram:
    """Requests by their latency, summed over engines."""

    count: float = 0.0
    total_seconds: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)  # upper bound in seconds → cumulative requests

    def add(self, kind: str, value: float, bound: str) -> None:
        """Add a sample of the metric: its `bucket`, `sum` or `count`."""
        if kind == "bucket":
            self.buckets[float(bound)] = self.buckets.get(float(bound), 0.0) + value
        elif kind == "sum":
            self.total_seconds += value
        elif kind == "count":
            self.count += value

    @property
    def statistics(self) -> dict[str, float]:
        """Seconds by `mean`, `p50`, ...; empty without requests."""
        if not self.count:
            return {}
        ordered = sorted(self.buckets.items())
        quantiles = {name: histogram_quantile(ordered, share) for name, share in QUANTILES.items()}
        known = {name: seconds for name, seconds in quantiles.items() if seconds is not None}
        return {"mean": self.total_seconds / self.count, **known}

    def exceeds(self, statistic: str, limit_seconds: float) -> bool:
        """Return whether a statistic is above a limit. A quantile counts only if it lies above the bucket of the
        limit: within a bucket its place is not known."""
        if not self.count:
            return False
        if statistic == "mean":
            return self.total_seconds / self.count > limit_seconds
        bound = min((bound for bound in self.buckets if bound >= limit_seconds), default=None)
        return bound is not None and self.buckets[bound] < QUANTILES[statistic] * self.count


def read_latencies(samples: Iterable[tuple[str, float, str]]) -> dict[str, LatencyHistogram]:
    """Return the histograms of LATENCY_METRICS among samples: (name, value, upper bound of a bucket)."""
    names = {metric: name for name, metric in LATENCY_METRICS.items()}
    result: dict[str, LatencyHistogram] = {}
    for sample, value, bound in samples:
        metric, _, kind = sample.rpartition("_")
        if name := names.get(metric):
            result.setdefault(name, LatencyHistogram()).add(kind, value, bound)
    return result


def histogram_quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile of a Prometheus histogram, interpolated linearly inside its bucket; None if it is empty."""
    wanted = share * buckets[-1][1] if buckets else 0.0
    if wanted <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket holds everything")
