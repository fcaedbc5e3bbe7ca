"""The table of deployments of a plan of a load: the same columns in the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from craton import formatting
from craton.planning.report import load_findings as findings
from craton.planning.serving.search import Deployment, Interval, LoadPlan


class DeploymentColumn(NamedTuple):
    """A column; `text` returns its cell of a deployment."""

    title: str
    text: Callable[[Deployment], str]
    is_number: bool = True


def deployment_heading(plan: LoadPlan, shown: int) -> str:
    """`best first by cost, on p5en.48xlarge (14 compared, 8 shown)`; no instance where they differ."""
    names = _instances(plan)
    where = f", on {names[0]}" if len(names) == 1 else ""
    by = "load" if plan.gpus_limit is not None and plan.by != "time" else plan.by
    count = f"{plan.compared:,} compared" + (f", {shown} shown" if shown < plan.compared else "")
    return f"best first by {by}{where} ({count})"


def order_text(plan: LoadPlan) -> str:
    """Return what the first deployment is best in, and how equal ones are ordered."""
    if plan.gpus_limit is not None and plan.by != "time":
        return f"what holds; of {formatting.counted(plan.gpus_limit, 'GPU')} the largest load within the limits; $/h"
    orders = {
        "cost": "$/h of whole nodes; fewer GPUs; a higher saturation rate",
        "gpus": "fewer GPUs; $/h; a higher saturation rate",
        "time": "mean end-to-end latency; $/h; a higher saturation rate",
    }
    return f"what holds, else what is nearest; {orders[plan.by]}"


def deployment_columns(plan: LoadPlan, *, detailed: bool, short: bool = False) -> list[DeploymentColumn]:
    """Return the columns that tell the deployments apart. `detailed`: also dollars per million input tokens, and the
    interval of those per output token. `short`: instances by their family, and titles in two lines."""
    rows = plan.deployments
    columns = [
        DeploymentColumn("", lambda row: "✓" if row.holds else "✗", is_number=False),
        DeploymentColumn("deployment", findings.short_text, is_number=False),
    ]
    names, space = _instances(plan), " "
    if len(names) > 1:
        families = {name: name.partition(".")[0] for name in names}
        shown = (
            families if short and len(set(families.values())) == len(names) else dict(zip(names, names, strict=True))
        )
        space = "\n" if short else space
        columns.append(
            DeploymentColumn(
                "instance",
                lambda row: shown[row.instance] + (f" x {row.nodes}" if row.nodes > 1 else ""),
                is_number=False,
            )
        )
    elif any(row.nodes > 1 for row in rows):
        columns.append(DeploymentColumn("nodes", lambda row: f"{row.nodes}"))
    columns += [
        DeploymentColumn("GPUs", lambda row: f"{row.gpus}"),
        DeploymentColumn(f"TTFT{space}p95", lambda row: seconds_text(row.ttft["p95"].value)),
        DeploymentColumn(f"TPOT{space}p95", lambda row: seconds_text(row.tpot["p95"].value)),
        DeploymentColumn(f"max{space}req/s", lambda row: findings.rate(row.max_rate.value)),
    ]
    if any(row.dollars_per_hour is not None for row in rows):
        columns.append(DeploymentColumn("$/h", lambda row: formatting.dollars(row.dollars_per_hour)))
        if detailed:
            columns.append(DeploymentColumn("$/M in", lambda row: _dollars(row.dollars_per_million_input)))
        columns.append(DeploymentColumn("$/M out", lambda row: _dollars(row.dollars_per_million_output)))
        if detailed:
            columns.append(DeploymentColumn("$/M out, 80%", lambda row: _range(row.dollars_per_million_output)))
    return columns


def seconds_text(value: float) -> str:
    return formatting.duration(value) if math.isfinite(value) else "∞"


def _instances(plan: LoadPlan) -> list[str]:
    return list(dict.fromkeys(row.instance for row in plan.deployments))


def _dollars(interval: Interval | None) -> str:
    return formatting.UNKNOWN if interval is None else formatting.small_dollars(interval.value)


def _range(interval: Interval | None) -> str:
    return formatting.UNKNOWN if interval is None else formatting.dollars_range(interval.low, interval.high)
