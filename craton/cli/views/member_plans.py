"""Plans of a job with members: one line for each member of a sweep and their sum, and the jobs that train weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from craton.job import Job
    from craton.planning import Plan

MAX_ROWS = 40
SECONDS_PER_HOUR = 3600.0
# Keys of `train:` that change neither the time of a step nor its memory.
UNPLANNED_KEYS = (
    *("learning_rate", "final_learning_rate", "schedule", "warmup_steps", "weight_decay", "betas", "epsilon"),
    *("clip", "seed", "initialize", "on_nan", "on_spike"),
)


@dataclass(frozen=True)
class MemberPlan:
    """The plan of one member; None if its model is a function."""

    name: str
    role: str  # "weights" or "member"
    plan: Plan | None


def plan_members(job: Job, report: Callable[[int, int, str], None] | None = None) -> list[MemberPlan]:
    """Plan every job that this one starts from, in the order in which they run, and every member of its sweep."""
    from craton.job import sweep_jobs
    from craton.planning import plan

    jobs: list[tuple[str, Job]] = []
    trained = job.weights_job
    while trained is not None:
        jobs.insert(0, ("weights", trained))
        trained = trained.weights_job
    jobs += [("member", swept.job) for swept in sweep_jobs(job)] if job.sweep else []
    planned: list[MemberPlan] = []
    plans: dict[str, Plan | None] = {}
    for number, (role, member) in enumerate(jobs):
        if report:
            report(number, len(jobs), member.name)
        same = _without_unplanned(member).model_dump_json()
        if same not in plans:
            plans[same] = plan(member) if member.model_shape is not None else None
        planned.append(MemberPlan(member.name, role, plans[same]))
    return planned


def member_plans_json(plans: list[MemberPlan]) -> dict[str, Any]:
    """Return the plans as JSON, with their sums."""
    members = [
        {
            "name": item.name,
            "role": item.role,
            "step_seconds": item.plan and item.plan.step_seconds,
            "memory_bytes": item.plan and item.plan.memory_bytes,
            "fits": item.plan and item.plan.fits,
            "run_seconds": item.plan and item.plan.run_seconds,
            "gpu_hours": _gpu_hours(item.plan),
            "cost_dollars": item.plan and item.plan.cost and item.plan.cost.cost_dollars,
        }
        for item in plans
    ]
    return {"members": members, "gpu_hours": _sum(plans, _gpu_hours), "cost_dollars": _sum(plans, _dollars)}


def render_member_plans(plans: list[MemberPlan], console: Console, parallel: int = 1) -> None:
    """Print a table of the members, with sums."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from craton import formatting

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    is_priced = any(item.plan and item.plan.cost for item in plans)
    unit = "CPU" if all(item.plan is None or _is_cpu(item.plan) for item in plans) else "GPU"
    titles = ["MEMBER", "STEP", "MEMORY", "FITS", "RUN", f"{unit} HOURS", *(["$"] if is_priced else [])]
    rows = []
    for item in plans[:MAX_ROWS]:
        name = f"{item.name} (weights)" if item.role == "weights" else item.name
        if item.plan is None:
            rows.append([name, *["–"] * (len(titles) - 1)])
            continue
        cost = [formatting.dollars(_dollars(item.plan))] if is_priced else []
        numbers = [
            formatting.duration(item.plan.step_seconds),
            formatting.memory(item.plan.memory_bytes),
            "yes" if item.plan.fits else "no",
            formatting.whole_duration(item.plan.run_seconds),
            formatting.digits(_gpu_hours(item.plan)),
        ]
        rows.append([name, *numbers, *cost])
    for place, title in enumerate(titles):  # a narrow terminal cuts names, not numbers
        width = max(len(row[place]) for row in [titles, *rows]) if place else None
        table.add_column(title, justify="right" if place else "left", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
    if len(plans) > MAX_ROWS:
        console.print(f"and {len(plans) - MAX_ROWS:,} more; --json prints all", highlight=False)
    total = f"together {formatting.digits(_sum(plans, _gpu_hours))} {unit} hours"
    if is_priced:
        total += f", {formatting.dollars(_sum(plans, _dollars))}"
    rounds = f", {parallel:,} at a time" if any(item.role == "member" for item in plans) else ""
    console.print(f"{formatting.counted(len(plans), 'member')}{rounds}: {total}", highlight=False)
    if parallel > 1 and rounds:
        console.print("planned as if each had the whole cluster; members that run at once divide it", highlight=False)


def _without_unplanned(job: Job) -> Job:
    """Return the job without the keys that change no plan, so that members which differ only in them share one."""
    assert job.train is not None
    defaults = {key: type(job.train).model_fields[key].default for key in UNPLANNED_KEYS}
    return job.model_copy(update={"name": "member", "train": job.train.model_copy(update=defaults)})


def _gpu_hours(plan: Plan | None) -> float | None:
    return None if plan is None else plan.run_seconds * plan.cluster.num_gpus / SECONDS_PER_HOUR


def _dollars(plan: Plan | None) -> float | None:
    return plan.cost.cost_dollars if plan is not None and plan.cost else None


def _sum(plans: list[MemberPlan], number: Callable[[Plan | None], float | None]) -> float | None:
    numbers = [value for item in plans if (value := number(item.plan)) is not None]
    return sum(numbers) if numbers else None


def _is_cpu(plan: Plan) -> bool:
    return plan.cluster.instance.gpu.generation == "cpu"
