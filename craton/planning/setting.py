"""A job on one cluster: everything needed to evaluate a layout, checked before the search starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from craton.errors import CratonError
from craton.formatting import memory
from craton.infrastructure import Cluster
from craton.job import ContentError, Job, checked_layout
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.planning.calibration import check_software, find_profile, predict
from craton.planning.prompt_lengths import mean_prompt_tokens
from craton.planning.rates import MachineRates, machine_of
from craton.planning.search import Candidate, Search, evaluate
from craton.planning.software import SoftwareProfile
from craton.planning.step import REAL_IMBALANCE, StepModel

PLANNED_KINDS = ("pretrain", "sft", "dpo", "grpo")


class PlanError(CratonError):
    """A job that cannot be planned, and what to change."""


@dataclass(frozen=True)
class Setting:
    """A job on one cluster, ready to evaluate layouts."""

    job: Job
    shape: ModelShape
    cluster: Cluster
    machine: MachineRates
    profile: SoftwareProfile
    model: StepModel

    @property
    def world(self) -> int:
        return self.cluster.num_gpus


def check_plannable(job: Job) -> None:
    """Raise PlanError if the job cannot be planned at all, before anything is measured or searched."""
    if job.serve:
        raise PlanError(f"{job.where('kind')}kind serve does not train; plan it with `plan_serving`")
    if job.kind not in PLANNED_KINDS:
        raise PlanError(
            f"{job.where('kind')}kind {job.kind} cannot be planned (allowed: {', '.join(PLANNED_KINDS)}, serve); "
            "check the file with `craton validate`"
        )
    if job.model_shape is None:
        raise PlanError(
            f"{job.where('model')}the model is a Python function, so its shape is unknown; to plan, give a "
            "preset, a config.json or inline numbers"
        )
    if job.total_tokens is None:
        raise PlanError(f"{job.where('train')}the training length is missing; set train.tokens or train.steps")
    check_software(job)


def setting_of(job: Job, cluster: Cluster) -> Setting:
    shape = job.model_shape
    assert shape is not None
    machine = machine_of(cluster)
    profile = find_profile(job.software, machine.gpu)
    model = StepModel(
        shape,
        job.sequence,
        rows_of_step(job, cluster.num_gpus),
        machine.rates,
        machine.network,
        profile.traits,
        lora=bool(job.train and job.train.lora),
        imbalance=REAL_IMBALANCE if shape.is_moe else 1.0,
        host_link_bytes_per_second=machine.host_link_bytes_per_second,
        weights=job.train.weights if job.train else "fp32",
        lora_rank=job.train.lora.rank if job.train and job.train.lora else 0,
        graphs=job.train is None or job.train.graphs != "off",
    )
    return Setting(job, shape, cluster, machine, profile, model)


def mean_sample_tokens(job: Job) -> tuple[float, float]:
    """Return the mean tokens of a rollout's prompt and completion: of prompts those of the first rows where they can be
    read, else half of what each may have."""
    longest = job.max_completion_tokens
    room = float(job.sequence - longest)
    prompt = mean_prompt_tokens(job)
    return room / 2 if prompt is None else min(prompt, room), longest / 2


def tokens_of_step(job: Job) -> float:
    """Return the tokens that a step trains on."""
    return float(job.global_batch_tokens) if job.rollout is None else job.rollout.samples * sum(mean_sample_tokens(job))


def rows_of_step(job: Job, world: int) -> int:
    """Return the rows of a step. Samples of rollouts are packed into rows, the same number on every rank."""
    if job.rollout is None:
        return job.global_batch_sequences
    return -(-math.ceil(tokens_of_step(job) / job.sequence) // world) * world


def placed_step_seconds(job: Job, cluster: Cluster, layout: Layout, leaf_nodes: int) -> float:
    """Return the step seconds of a placement: every aligned run of `leaf_nodes` nodes, in rank order, shares a leaf
    switch. 0: all nodes share one.

    Collectives between leaves get the cluster's oversubscribed bandwidth; pipeline sends are not slowed.
    """
    check_plannable(job)
    setting = setting_of(job, replace(cluster, leaf_nodes=leaf_nodes))
    return predict(setting.profile, evaluate(setting.model, setting.machine, setting.profile, layout).terms).seconds


def chosen_layout(setting: Setting, search: Search) -> Candidate:
    """Return the layout the user wrote, else the best that fits, else the one with the smallest memory."""
    try:
        fixed = checked_layout(setting.job, setting.world, trained=setting.profile.traits.own_layers)
    except ContentError as error:
        where = setting.job.where("layout")
        raise PlanError(where + "; ".join(problem.removeprefix(where) for problem in error.problems)) from None
    if fixed is not None:
        return evaluate(setting.model, setting.machine, setting.profile, fixed)
    if search.candidates:
        return search.candidates[0]
    if search.too_large:
        return min(search.too_large, key=lambda candidate: candidate.memory_bytes)
    raise PlanError(f"{setting.job.where('cluster')}{nothing_fits(setting, search)}")


def nothing_fits(setting: Setting, search: Search) -> str:
    if search.too_large:
        need = min(candidate.memory_bytes for candidate in search.too_large)
        limit = setting.machine.gpu.memory_bytes
        return (
            f"no layout fits: the smallest needs {memory(need)} of {memory(limit)} per GPU; use more GPUs or "
            "GPUs with more memory"
        )
    batch = setting.model.global_batch_sequences
    return (
        f"no layout divides the job: {batch} sequences per step on {setting.world} GPUs; choose a global batch and a "
        "GPU count with more common divisors"
    )
