"""Latencies of a server from its /metrics, the limits from its job, and the plan for its load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton.errors import CratonError
from craton.job import load_job
from craton.observability.diagnosis.latencies import MissedLimit, SnapshotLatencies
from craton.observability.diagnosis.tables import threshold
from craton.orchestration import ServerState
from craton.telemetry import RunDirectory, read_json


def latencies_of(run: RunDirectory, answer: ServerState) -> SnapshotLatencies | None:
    """Return the latencies of a server's requests; None before the first."""
    first = answer.latencies.get("ttft")
    if first is None or not first.count:
        return None
    missed = []
    for (name, statistic), limit in _limits(run).items():
        histogram = answer.latencies.get(name)
        if histogram is None or histogram.count < threshold("slo_requests") or not histogram.exceeds(statistic, limit):
            continue
        missed.append(MissedLimit(name, statistic, limit, histogram.statistics[statistic]))
    return SnapshotLatencies(
        num_requests=int(first.count),
        seconds={name: histogram.statistics for name, histogram in answer.latencies.items() if histogram.count},
        missed=tuple(missed),
        planned=_planned(read_json(run.plan_path)),
    )


def _limits(run: RunDirectory) -> dict[tuple[str, str], float]:
    try:
        serve = load_job(run.job_path).serve
    except CratonError:  # a job of another version: without limits
        return {}
    return serve.slo.limits if serve is not None else {}


def _planned(plan: Mapping[str, Any]) -> dict[str, float]:
    load = plan.get("load")
    names = {"ttft": "ttft_seconds", "tpot": "tpot_seconds", "tokens_per_second": "tokens_per_second"}
    values = {name: load.get(key) for name, key in names.items()} if isinstance(load, Mapping) else {}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
