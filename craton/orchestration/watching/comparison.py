"""Compare predicted with measured values when a run has ended.

Seconds and rates are medians over the steps of the newest generation, so that one slow step has no weight; blocked
checkpoint time, which occurs in few steps, is the mean. Warm-up steps are left out if there are enough steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from craton.telemetry import TWINS, RunDirectory, RunSummary, plan_twins, read_json
from craton.telemetry.files import paths_in, tail_lines

WARM_STEPS = 3
FEW_STEPS = 10
SHORT_RUN_SECONDS = 3600.0  # below it, startup outweighs the failures in the planned goodput
READ_BYTES = 4 << 20  # of rank 0's metrics: thousands of steps


@dataclass(frozen=True)
class Compared:
    """One value of TWINS, predicted and measured; None: not available."""

    name: str
    predicted: float | None
    low: float | None  # the plan's interval, if it has one
    high: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measurement lies in the plan's interval."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def compare(run: RunDirectory, summary: RunSummary) -> list[Compared]:
    """Return all of TWINS that were predicted or measured, in their order."""
    plan = read_json(run.plan_path)
    predicted = plan_twins(plan)
    measured = {**summary.measured, **_measured(run, summary)}
    result = []
    for name in TWINS:
        if name in predicted or name in measured:
            low, high = _interval(plan, name)
            if name == "goodput" and (summary.wall_seconds or 0.0) < SHORT_RUN_SECONDS:
                low = high = None
            result.append(Compared(name, predicted.get(name), low, high, measured.get(name)))
    return result


def _measured(run: RunDirectory, summary: RunSummary) -> dict[str, float]:
    lines = [line for path in paths_in(run.path / "metrics", "*.jsonl") for line in tail_lines(path, READ_BYTES)]
    steps = [
        line
        for line in lines
        if line.get("rank") == 0 and line.get("generation") == summary.generation and "run_step_seconds" in line
    ]
    if len(steps) >= FEW_STEPS:
        steps = steps[WARM_STEPS:]
    result = {}
    for name in TWINS:
        values = [line[key] for line in steps if isinstance(line.get(key := f"run_{name}"), int | float)]
        if values and name not in ("goodput", "cost_dollars", "memory_bytes"):
            result[name] = statistics.fmean(values) if name == "checkpoint_seconds" else statistics.median(values)
    return result


def _interval(plan: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    if name in ("step_seconds", "tokens_per_second", "mfu") and plan.get("step_seconds_low"):
        low, middle, high = (plan[f"step_seconds{suffix}"] for suffix in ("_low", "", "_high"))
        if name == "step_seconds":
            return low, high
        # The interval of a rate follows from that of the step time, its inverse.
        return plan[name] * middle / high, plan[name] * middle / low
    detail = plan.get({"goodput": "goodput_detail", "cost_dollars": "cost"}.get(name, "")) or {}
    return detail.get(f"{name}_low"), detail.get(f"{name}_high")
