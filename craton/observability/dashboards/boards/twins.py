"""Queries for metrics that a plan predicts and a run measures: always both lines."""

from __future__ import annotations

from craton.observability.dashboards.model import PanelQuery
from craton.telemetry import METRICS, TWINS

# Servers export the same names for the steps of their requests; they have the label model_name and their own board.
RUN_HERE = 'run=~"$run", model_name=""'


def twin(name: str, *more: PanelQuery, where: str = RUN_HERE) -> tuple[PanelQuery, ...]:
    """Return the queries for measured and planned values. Metrics per rank become the median and the highest rank, so
    that there are few lines at any scale."""
    assert name in TWINS, f"{name} has no twin"
    measured = f"craton_run_{name}{{{where}}}"
    if METRICS[f"run_{name}"].scope == "rank":
        lines: tuple[PanelQuery, ...] = (
            PanelQuery(f"max by (run) ({measured})", "{{run}} highest rank"),
            PanelQuery(f"quantile by (run) (0.5, {measured})", "{{run}} median"),
        )
    else:
        lines = (PanelQuery(f"max by (run) ({measured})", "{{run}}"),)
    plan = PanelQuery(f"max by (run) (craton_plan_{name}{{{where}}})", "{{run}} planned", is_plan=True)
    return (*lines, plan, *more)
