"""The metric vocabulary: names, units and meanings, read from metrics.toml.

`METRICS` maps every name to its `Metric`. For each X in `TWINS` there are `plan_X` (predicted) and `run_X` (measured).
A record names the value of a label behind a slash: `run_term_reward/math`.
`PHASES` are the parts of every step; a step of reinforcement learning also has `ROLLOUT_PHASES`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PREFIX = "craton_"
VALIDATION = "validation_"
PHASES = ("data", "compute", "communication", "optimizer", "checkpoint")
ROLLOUT_PHASES = ("rollout", "reward", "sync")  # in the order of a step, before PHASES


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    help: str
    kind: Literal["gauge", "counter"]
    scope: Literal["run", "rank"]
    label: str = ""  # additional label, besides run, node, leaf and rank
    group: Literal["", "rl", "preference", "evaluation"] = ""  # recorded by these runs only

    @property
    def prometheus_name(self) -> str:
        """The name of its samples on the endpoint."""
        return f"{PREFIX}{self.name}_total" if self.kind == "counter" else f"{PREFIX}{self.name}"


def with_label(name: str, label: str) -> str:
    """Return the name of a labelled metric in a record."""
    return f"{name}/{label}"


def split_label(name: str) -> tuple[str, str] | None:
    """Return the metric and its label of a name in a record; None for a metric without one."""
    base, slash, label = name.partition("/")
    known = METRICS.get(base) if slash else None
    return (base, label) if known is not None and known.label else None


def step_phases(known: Container[str]) -> tuple[str, ...]:
    """Return the phases of a step, in its order: PHASES, after those of ROLLOUT_PHASES that are `known`."""
    return (*(phase for phase in ROLLOUT_PHASES if phase in known), *PHASES)


def plan_twins(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a plan.json that a run also measures, by their names in TWINS."""
    phases = plan.get("phases")
    result = {}
    for name in TWINS:
        value = plan.get(name)
        if value is None and isinstance(phases, Mapping):
            value = phases.get(name.removesuffix("_seconds"))
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            result[name] = float(value)
    return result


def plan_checkpoint_intervals(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return tier → checkpoint interval in seconds, from a plan.json."""
    storage = plan.get("storage")
    tiers = storage.get("tiers") if isinstance(storage, Mapping) else None
    return {str(tier["tier"]): float(tier["every_seconds"]) for tier in tiers or () if tier.get("every_seconds")}


def _read() -> tuple[dict[str, Metric], tuple[str, ...]]:
    table = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    metrics, twins = [], []
    for name, row in table.items():
        is_twin, is_validated = row.pop("twin", False), row.pop("validated", False)
        if is_twin:
            twins.append(name)
        names = (f"plan_{name}", f"run_{name}") if is_twin else (name,)
        metrics += [Metric(name=item, **row) for item in names]
        if is_validated:
            on_validation = {**row, "help": f"{row['help']}, on data.validation"}
            metrics.append(Metric(name=f"run_{VALIDATION}{name.removeprefix('run_')}", **on_validation))
    return {metric.name: metric for metric in metrics}, tuple(twins)


METRICS, TWINS = _read()
