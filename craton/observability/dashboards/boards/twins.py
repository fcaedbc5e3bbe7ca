"""Panels of what a plan predicts and a run measures: both lines, always."""

from __future__ import annotations

from craton.observability.dashboards.model import PanelQuery
from craton.telemetry import METRICS, TWINS

# Servers measure the same names against the machine's roof; they have the label model_name, and a board of their own.
RUN_HERE = 'run=~"$run", model_name=""'


def twin(name: str, *more: PanelQuery, where: str = RUN_HERE) -> tuple[PanelQuery, ...]:
    """Measured and planned. What each rank measures for itself is told by its median and its highest rank: however many
    there are, lines stay few."""
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
