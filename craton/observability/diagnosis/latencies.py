"""Latencies of a server as measured, beside the limits of its job and the plan for its load."""

from __future__ import annotations

from dataclasses import dataclass, field

LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end latency"}


@dataclass(frozen=True)
class MissedLimit:
    """A latency of `serve.slo` above its limit."""

    latency: str  # ttft, tpot, e2e
    statistic: str  # mean, p50, p90, p95, p99
    limit_seconds: float
    seconds: float


@dataclass(frozen=True)
class SnapshotLatencies:
    """Requests of a server since its engine was started."""

    num_requests: int
    seconds: dict[str, dict[str, float]]  # ttft, tpot, e2e, queue, prefill, decode → mean, p50, p90, p95, p99
    missed: tuple[MissedLimit, ...] = ()
    planned: dict[str, float] = field(default_factory=dict)  # ttft, tpot (means in seconds), tokens_per_second

    def mean(self, name: str) -> float:
        return self.seconds.get(name, {}).get("mean", 0.0)
