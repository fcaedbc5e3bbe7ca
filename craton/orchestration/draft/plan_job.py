"""Step 4 of a start: predict the job's performance, and check that it fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from craton.formatting import memory
from craton.job import Job, is_planned_only
from craton.orchestration.draft.sizes import check_memory, check_offload
from craton.orchestration.errors import StartError
from craton.planning import Plan, plan
from craton.planning.serving import ServePlan, plan_serving
from craton.planning.serving.search import with_planned_load

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job: for training, for serving, or neither with a note why."""

    training: Plan | None = None
    serving: ServePlan | None = None
    note: str = ""

    @property
    def either(self) -> Plan | ServePlan | None:
        return self.training or self.serving


def plan_job(job: Job, progress: Progress | None = None) -> JobPlan:
    """Plan a job, and refuse one that does not fit in memory."""
    if job.kind == "serve":
        check_own_engine(job)
        serving = with_planned_load(plan_serving(job), job)
        check_room(job, serving)
        return JobPlan(serving=serving)
    if job.kind == "eval":
        return JobPlan()
    if job.kind == "command":
        return JobPlan(note="no plan: a command runs as it is")
    if job.model_shape is None:
        return JobPlan(note="no plan: the model is a function, whose shape is unknown")
    training = plan(job, progress=progress)
    check_offload(job, training)
    check_memory(job, training)
    return JobPlan(training)


def check_own_engine(job: Job) -> None:
    """Refuse a server that Craton can plan but not run."""
    assert job.serve is not None
    if is_planned_only(job.software):
        raise StartError(
            f"{job.where('software')}software: {job.software} is planned but not run by Craton; remove `software:` to "
            "serve with Craton's engine, or start that engine with kind command"
        )
    if job.serve.replicas is not None and job.serve.replicas > 1:
        raise StartError(
            f"{job.where('serve', 'replicas')}serve.replicas: {job.serve.replicas} are for plans only; a run "
            "starts one server; remove it, and start one run for each server"
        )


def check_room(job: Job, serving: ServePlan) -> None:
    """Refuse before launch a server whose KV cache cannot hold one request, and suggest changes."""
    if serving.fits:
        return
    weights, limit = serving.memory_parts["weights"], serving.memory_limit_bytes
    advice = [] if serving.tp >= serving.cluster.instance.num_gpus else ["more ranks (layout: {tp: N})"]
    if serving.model.is_moe and 1 == serving.ep < math.gcd(serving.tp, serving.model.experts):
        advice.append(f"experts split over the ranks (layout: {{tp: {serving.tp}, ep: N}})")
    if serving.precision not in ("fp8", "int4"):
        advice.append("serve.precision: fp8 or int4" if not serving.model.is_moe else "serve.precision: fp8")
    if weights < limit:
        advice += ["serve.kv_precision: fp8", "a larger serve.memory", "a shorter serve.max_length"]
    raise StartError(
        f"{job.where('model')}{job.served_name} does not fit {serving.cluster.name}: its weights take "
        f"{memory(weights)} of {memory(limit)} per rank, which leaves a KV cache of {serving.kv_tokens:,} tokens "
        f"where {serving.needed_tokens:,} are needed; use {', '.join([*advice, 'a smaller model'])}"
    )
