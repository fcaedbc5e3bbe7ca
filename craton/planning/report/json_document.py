"""A plan as plain JSON: every field of `Plan` under its own name, numbers in base units, only valid JSON types.

The headline numbers are at the top level under the same names as a run's measurements: `goodput` and `cost_dollars` are
numbers, with details in `goodput_detail` and `cost`.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from datetime import date
from typing import Any

from craton.planning.report.load_findings import load_verdict
from craton.planning.result import INTERVAL_LEVEL, Plan
from craton.planning.serving import ServePlan
from craton.planning.serving.search import LoadPlan
from craton.planning.strategies import PlannedStrategy, StrategiesPlan


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A dict for `json.dumps`; a number that is infinite or undefined (no failures expected) becomes null."""
    document: dict[str, Any] = {"schema": 1, "interval_level": INTERVAL_LEVEL, **_plain_fields(plan)}
    document["fits"] = plan.fits
    document["layout_text"] = str(plan.layout)
    document["model"] |= {
        "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters,
    }
    document["cluster"]["num_gpus"] = plan.cluster.num_gpus
    document["goodput_detail"] = document.pop("goodput")
    document["goodput"] = document["goodput_detail"]["goodput"]
    document["cost_dollars"] = document["cost"]["cost_dollars"] if plan.cost else None
    return document


def serving_to_json(plan: ServePlan) -> dict[str, Any]:
    """Return a server's plan for `json.dumps`."""
    document: dict[str, Any] = {"schema": 1, **_plain_fields(plan)}
    document |= {"fits": plan.fits, "requests": plan.requests}
    if plan.load is not None:
        document |= {"ttft_seconds": _plain(plan.load.ttft_seconds), "tpot_seconds": _plain(plan.load.tpot_seconds)}
    document["model"] |= {
        "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters,
    }
    return document


def load_to_json(plan: LoadPlan) -> dict[str, Any]:
    """Return the plan of a load for `json.dumps`; means of the chosen deployment stand at the top level under the names
    of a run's measurements. A latency without a bound becomes null."""
    chosen = plan.chosen
    document: dict[str, Any] = {"schema": 1, "interval_level": INTERVAL_LEVEL, **_plain_fields(plan)}
    document |= {
        "load": plan.load.model_dump(exclude_none=True),
        "holds": plan.holds,
        "verdict": load_verdict(plan),
        "ttft_seconds": _plain(chosen.ttft["mean"].value),
        "tpot_seconds": _plain(chosen.tpot["mean"].value),
        "tokens_per_second": _plain(chosen.tokens_per_second.value),
        "tokens_per_second_per_gpu": _plain(chosen.tokens_per_second_per_gpu.value),
    }
    rows = [document["chosen"], *document["deployments"]]
    for row, deployment in zip(rows, [chosen, *plan.deployments], strict=True):
        row |= {"holds": deployment.holds, "is_saturated": deployment.is_saturated, "text": str(deployment.layout)}
    return document


def strategies_to_json(plan: StrategiesPlan) -> dict[str, Any]:
    """Return the plan of strategies for `json.dumps`: every row with its accuracy and what was measured."""
    document: dict[str, Any] = {"schema": 1, "interval_level": INTERVAL_LEVEL, **_plain_fields(plan)}
    document["known"].pop("counts")
    for name in ("best", "best_with_truth"):
        row = getattr(plan, name)
        document[name] = _strategy_row(row) if row is not None else None
    document["rows"] = [_strategy_row(row) for row in plan.rows]
    return document


def _strategy_row(row: PlannedStrategy) -> dict[str, Any]:
    document = {**_plain_fields(row), "accuracy": row.accuracy, "ratio": row.ratio, "is_inside": row.is_inside}
    if row.usage is not None:
        document["usage"]["tokens"] = row.usage.tokens
    return document


def _plain_fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if hasattr(value, "_asdict"):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    # json.dumps takes Python's floats and ints, not numpy's scalars.
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
