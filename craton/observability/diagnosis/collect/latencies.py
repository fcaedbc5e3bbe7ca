"""Latencies of a server from its /metrics, the limits from its job, and the plan for its load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton.observability.diagnosis.latencies import MissedLimit, SnapshotLatencies
from craton.orchestration import ServerState, ServerTargets
from craton.telemetry import RunDirectory, read_json


def latencies_of(run: RunDirectory, answer: ServerState) -> SnapshotLatencies | None:
    """Return the latencies of a server's requests; None before the first."""
    first = answer.latencies.get("ttft")
    if first is None or not first.count:
        return None
    targets = ServerTargets.of(run)
    missed = [MissedLimit(*name, targets.limits[name], seconds) for name, seconds in targets.missed(answer).items()]
    return SnapshotLatencies(
        num_requests=int(first.count),
        seconds={name: histogram.statistics for name, histogram in answer.latencies.items() if histogram.count},
        missed=tuple(missed),
        planned={
            **{name: seconds for (name, statistic), seconds in targets.planned.items() if statistic == "mean"},
            **_throughput(read_json(run.plan_path)),
        },
    )


def _throughput(plan: Mapping[str, Any]) -> dict[str, float]:
    load = plan.get("load")
    rate = load.get("tokens_per_second") if isinstance(load, Mapping) else None
    return {"tokens_per_second": float(rate)} if isinstance(rate, int | float) else {}
