"""The search over clusters: what it chooses by, limits that bind, and clusters that cannot run the job."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import cache

import pytest
from rich.console import Console
from whole_plans import JOB, OWN_PRICE, TODAY, check_sums_and_units, small

from craton.errors import CratonError
from craton.job import parse_job
from craton.planning import Plan, PlanError, plan_clusters
from craton.planning.report import plan_html, render_front
from craton.planning.report.findings import is_on_front


def test_the_users_own_price_wins_in_a_search_over_clusters_too() -> None:
    answer = plan_clusters(parse_job(JOB + OWN_PRICE), ["p5.48xlarge", "p5en.48xlarge"], [16], today=TODAY)
    assert answer.cluster.name == "p5.48xlarge x 2"
    assert answer.cost is not None
    assert answer.cost.dollars_per_hour_per_instance == 10.0


def searched(by: str = "cost", deadline_days: float | None = None, budget: float | None = None) -> Plan:
    return _searched(by, deadline_days, budget)


@cache
def _searched(by: str, deadline_days: float | None, budget: float | None) -> Plan:
    return plan_clusters(
        parse_job(JOB),
        ["p5.48xlarge", "p6-b200.48xlarge"],
        [16, 32],
        by=by,
        deadline_seconds=deadline_days * 86400 if deadline_days else None,
        budget_dollars=budget,
        today=TODAY,
    )


@pytest.mark.parametrize("by", ["time", "cost", "gpus"])
def test_by_what_the_cluster_is_chosen(by: str) -> None:
    answer = searched(by)
    check_sums_and_units(answer)
    assert len(answer.front) == 4
    key: dict[str, Callable[[int], float]] = {
        "time": lambda index: answer.front[index].run_seconds,
        "cost": lambda index: answer.front[index].cost_dollars or math.inf,
        "gpus": lambda index: float(answer.front[index].layout.world),
    }
    chosen = [index for index, entry in enumerate(answer.front) if entry.reason == "chosen"]
    assert len(chosen) == 1
    assert key[by](chosen[0]) == min(key[by](index) for index in range(4))
    if by != "gpus":
        assert is_on_front(answer.front[chosen[0]], answer.front)  # nothing beats it in both time and cost


def test_the_runner_up_of_a_search_is_another_instance() -> None:
    answer = searched()
    assert answer.runner_up is not None
    assert answer.cluster.instance.name not in answer.runner_up.cluster
    others = [entry for entry in answer.front if answer.cluster.instance.name not in entry.cluster]
    assert answer.runner_up.cost_dollars == min(entry.cost_dollars or math.inf for entry in others)


def test_a_deadline_and_a_budget_bind() -> None:
    free = searched()
    assert free.cost is not None
    deadline_days = 0.6 * free.run_seconds / 86400
    pressed = searched(deadline_days=deadline_days)
    assert pressed.run_seconds <= deadline_days * 86400 < free.run_seconds
    assert pressed.cost is not None
    assert pressed.cost.cost_dollars >= free.cost.cost_dollars
    fastest = searched("time")
    assert fastest.cost is not None
    poor = searched("time", budget=0.5 * (fastest.cost.cost_dollars + free.cost.cost_dollars))
    assert poor.cost is not None
    assert poor.cost.cost_dollars <= 0.5 * (fastest.cost.cost_dollars + free.cost.cost_dollars)
    assert poor.run_seconds > fastest.run_seconds


def test_what_cannot_be_met_says_what_could() -> None:
    def one(**limits: float) -> Plan:
        return plan_clusters(parse_job(JOB), ["p5.48xlarge"], [16], today=TODAY, **limits)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match=r"deadline of 12h.*fastest, p5\.48xlarge x 2, takes \d+d \d+h"):
        one(deadline_seconds=43200.0)
    with pytest.raises(PlanError, match=r"budget of \$100; .*cheapest, p5\.48xlarge x 2, costs \$\d+"):
        one(budget_dollars=100.0)
    with pytest.raises(PlanError, match=r"a deadline of .* and a budget of"):
        one(deadline_seconds=3600.0, budget_dollars=100.0)


def test_the_search_evaluates_what_the_single_plan_does() -> None:
    one = plan_clusters(parse_job(JOB), ["p5.48xlarge"], [16], today=TODAY)
    assert (one.layout, one.run_seconds) == (small().layout, small().run_seconds)
    assert one.runner_up is None
    assert [entry.reason for entry in one.front] == ["chosen"]


def test_a_fixed_layout_is_not_forgotten_in_a_search_over_clusters() -> None:
    """It is kept, or the plan says that it was not."""
    answer = plan_clusters(parse_job(JOB + "layout: {tp: 8}\n"), ["p5.48xlarge"], [16], today=TODAY)
    assert answer.layout.tp == 8 or any("layout" in warning for warning in answer.warnings)


def test_clusters_that_cannot_run_the_job_are_named() -> None:
    job = parse_job(JOB.replace("llama-3.1-8b", "llama-3.1-405b"))
    answer = plan_clusters(job, ["p5.48xlarge"], [8, 256], today=TODAY)
    assert answer.cluster.name == "p5.48xlarge x 32"
    assert any("p5.48xlarge x 1: no layout fits" in warning for warning in answer.warnings)
    with pytest.raises(PlanError, match=r"no cluster in the search can run this job: p5\.48xlarge x 1: .* GiB"):
        plan_clusters(job, ["p5.48xlarge"], [8], today=TODAY)


def test_gpus_that_are_no_whole_nodes() -> None:
    with pytest.raises(PlanError, match=r"12 GPUs is not a whole number of p5\.48xlarge nodes"):
        plan_clusters(parse_job(JOB), ["p5.48xlarge"], [12], today=TODAY)
    with pytest.raises(CratonError, match=r"p5\.84xlarge"):
        plan_clusters(parse_job(JOB), ["p5.84xlarge"], [64], today=TODAY)


def test_progress_counts_every_layout() -> None:
    calls: list[tuple[int, int, str]] = []
    plan_clusters(
        parse_job(JOB),
        ["p5.48xlarge"],
        [8, 16],
        today=TODAY,
        progress=lambda done, total, what: calls.append((done, total, what)),
    )
    for number in (1, 2):
        counts = [(done, total) for done, total, what in calls if what.startswith(f"cluster {number} of 2, layouts on")]
        assert counts[0][0] == 0
        assert {total for _, total in counts} == {counts[0][1]}
        assert counts[0][1] > 10, "every layout counts"
        assert counts[-1] == (counts[0][1], counts[0][1])
        assert counts == sorted(counts), "it never falls"


def test_the_front_can_be_rendered() -> None:
    console = Console(file=io.StringIO(), width=100)
    render_front(searched(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(entry.cluster in text for entry in searched().front)
    assert "<html" in plan_html(searched(), TODAY)
