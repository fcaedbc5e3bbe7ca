"""A plan speaks the language of measurement: one table of names, each prediction with its measured twin."""

from __future__ import annotations

import dataclasses
import re

from craton.planning import Plan
from craton.telemetry import METRICS, PHASES, ROLLOUT_PHASES, TWINS, plan_twins, step_phases


def test_every_prediction_has_its_twin() -> None:
    assert set(TWINS) == {
        "step_seconds",
        "rollout_seconds",
        "reward_seconds",
        "sync_seconds",
        "data_seconds",
        "compute_seconds",
        "communication_seconds",
        "optimizer_seconds",
        "checkpoint_seconds",
        "memory_bytes",
        "tokens_per_second",
        "mfu",
        "goodput",
        "cost_dollars",
    }
    for name in TWINS:
        planned, measured = METRICS[f"plan_{name}"], METRICS[f"run_{name}"]
        assert (planned.unit, planned.kind) == (measured.unit, measured.kind)
    of_a_plan_alone = {"step_seconds_low", "step_seconds_high", "checkpoint_interval_seconds"}
    planned_names = {name.removeprefix("plan_") for name in METRICS if name.startswith("plan_")}
    assert planned_names - of_a_plan_alone == set(TWINS)


def test_every_metric_says_its_unit_and_meaning() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.help
        assert not metric.help.endswith(".")
        assert metric.unit in ("seconds", "bytes", "tokens_per_second", "ratio", "dollars", "1")
        assert metric.kind in ("gauge", "counter")
        assert metric.scope in ("run", "rank")
        if metric.unit in ("seconds", "bytes", "dollars", "tokens_per_second"):
            assert re.sub("_(low|high)$", "", name).endswith(metric.unit)
    assert METRICS["run_loss"].prometheus_name == "craton_run_loss"
    assert METRICS["run_skipped_steps"].prometheus_name == "craton_run_skipped_steps_total"


def test_the_planner_predicts_what_the_table_names() -> None:
    """plan.json holds each twin under its own name or in its phases; the names must not drift apart."""
    fields = {field.name for field in dataclasses.fields(Plan)}
    phases = {*ROLLOUT_PHASES, *PHASES}
    # goodput and cost_dollars are put at the top level of plan.json beside their details.
    for name in TWINS:
        assert name in fields | {"cost_dollars"} or name.removesuffix("_seconds") in phases


def test_only_reinforcement_learning_has_the_phases_of_rollouts() -> None:
    assert step_phases({}) == PHASES == ("data", "compute", "communication", "optimizer", "checkpoint")
    assert step_phases({"reward": 0.0, "rollout": 1.0, "data": 2.0}) == ("rollout", "reward", *PHASES)


def test_what_is_measured_on_validation_data_has_the_same_unit() -> None:
    validated = {name for name in METRICS if name.startswith("run_validation_")}
    assert {"run_validation_reward", "run_validation_reward_accuracy"} <= validated
    for name in validated:
        assert METRICS[name].unit == METRICS[name.replace("validation_", "")].unit


def test_what_a_plan_does_not_know_is_left_out() -> None:
    plan = {"step_seconds": 2, "mfu": None, "phases": {"data": 0.25}, "goodput": {"goodput": 1}, "cost_dollars": True}
    assert plan_twins(plan) == {"step_seconds": 2.0, "data_seconds": 0.25}
    assert plan_twins({}) == {}
