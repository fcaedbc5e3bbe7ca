"""What the job of a server wants of its latency, and what its plan expects, in numbers and words for all views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from craton import formatting
from craton.errors import CratonError
from craton.job import load_job
from craton.orchestration.server import ServerState
from craton.telemetry import RunDirectory, read_json

MIN_REQUESTS = 20  # the p95 of fewer is their maximum
# Predictions of a plan's load, by latency and statistic.
PLANNED = {("ttft", "mean"): "ttft_seconds", ("ttft", "p95"): "ttft_p95_seconds", ("tpot", "mean"): "tpot_seconds"}

Latency = tuple[str, str]  # ttft, tpot or e2e; mean, p50, p90, p95 or p99


@dataclass(frozen=True)
class ServerTargets:
    """Limits of `serve.slo` and predictions for `serve.load`, in seconds."""

    limits: Mapping[Latency, float] = field(default_factory=dict)
    planned: Mapping[Latency, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunDirectory) -> ServerTargets:
        """Return the targets of a run's job and plan; none of a job that cannot be read."""
        load: Any = read_json(run.plan_path).get("load")
        try:
            serve = load_job(run.job_path).serve
        except CratonError:
            serve = None
        return cls.planned_for(load if isinstance(load, dict) else {}, serve.slo.limits if serve is not None else {})

    @classmethod
    def planned_for(cls, load: Mapping[str, Any], limits: Mapping[Latency, float]) -> ServerTargets:
        """Return limits beside the predictions of a planned load."""
        values = {name: load.get(key) for name, key in PLANNED.items()}
        return cls(limits, {name: float(value) for name, value in values.items() if isinstance(value, int | float)})

    def limits_text(self) -> str:
        """Return `TTFT p95 ≤ 500 ms (planned 310 ms), TPOT mean ≤ 20 ms`."""
        return ", ".join(f"{_limit(name, limit)}{self._plan(name)}" for name, limit in self.limits.items())

    def latency_text(self, name: str) -> str:
        """Return `planned 45 ms on average; limit p95 ≤ 500 ms` of a latency; empty without either."""
        planned = self.planned.get((name, "mean"))
        parts = [] if planned is None else [f"planned {formatting.duration(planned)} on average"]
        limits = [_limit(key, seconds).partition(" ")[2] for key, seconds in self.limits.items() if key[0] == name]
        return "; ".join([*parts, *([f"limit {', '.join(limits)}"] if limits else [])])

    def tpot_texts(self, state: ServerState) -> list[str]:
        """Return `TPOT 12 ms (planned 11 ms)`, the mean since the start; empty without requests."""
        tpot = state.latencies.get("tpot")
        if tpot is None or not tpot.count:
            return []
        return [f"TPOT {formatting.duration(tpot.statistics['mean'])}{self._plan(('tpot', 'mean'))}"]

    def missed(self, state: ServerState) -> dict[Latency, float]:
        """Return the measured seconds of each limit that is missed since the start."""
        found = {}
        for name, limit in self.limits.items():
            histogram = state.latencies.get(name[0])
            if histogram is not None and histogram.count >= MIN_REQUESTS and histogram.exceeds(name[1], limit):
                found[name] = histogram.statistics[name[1]]
        return found

    def missed_texts(self, state: ServerState) -> list[str]:
        """Return `misses TTFT p95 ≤ 500 ms: about 1.3 s` for each limit that is missed."""
        return [
            f"misses {_limit(name, self.limits[name])}: {'' if name[1] == 'mean' else 'about '}"
            f"{formatting.duration(seconds)}"
            for name, seconds in self.missed(state).items()
        ]

    def _plan(self, name: Latency) -> str:
        seconds = self.planned.get(name)
        return "" if seconds is None else f" (planned {formatting.duration(seconds)})"


def _limit(name: Latency, seconds: float) -> str:
    return f"{name[0].upper()} {name[1]} ≤ {formatting.setting(seconds)}"
