"""Queries as Grafana sends them: variables filled in, ranges for lines, moments for the rest."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from observability.dashboards.watched_cluster import EVERY_SECONDS, Cluster

from craton.observability.dashboards.model import Panel, PanelQuery

EVERYTHING = ".*"
STEP_SECONDS = 1.0
# Grafana: $__rate_interval is max($__interval + scrape interval, 4 * scrape interval).
RATE_SECONDS = max(STEP_SECONDS + EVERY_SECONDS, 4 * EVERY_SECONDS)


def filled_in(expr: str, chosen: Mapping[str, Iterable[str] | str]) -> str:
    """Several values are joined as a regular expression, each of them escaped; All is what the variable says it is."""
    values = {"__rate_interval": f"{round(RATE_SECONDS * 1000)}ms"}
    for name, value in chosen.items():
        if isinstance(value, str):
            values[name] = value if value == EVERYTHING else _escaped(value)
        else:
            values[name] = f"({'|'.join(map(_escaped, value))})"
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expr)


def answer(cluster: Cluster, panel: Panel, query: PanelQuery, chosen: Mapping[str, Iterable[str] | str]) -> list[Any]:
    """Series with at least one finite value; OSError where Prometheus refuses."""
    expr = filled_in(query.expr, chosen)
    now = time.time()
    if panel.kind == "lines":
        span = {"start": f"{now - 5:.3f}", "end": f"{now:.3f}", "step": f"{STEP_SECONDS}"}
        found = cluster.ask("/api/v1/query_range", query=expr, **span)["result"]
        return [each for each in found if any(math.isfinite(float(value)) for _, value in each["values"])]
    found = cluster.ask("/api/v1/query", query=expr)["result"]
    return [each for each in found if math.isfinite(float(each["value"][1]))]


def _escaped(value: str) -> str:
    """Twice for PromQL's own string."""
    return re.sub(r"[\\^$.*+?()\[\]{}|]", r"\\\\\g<0>", value)
