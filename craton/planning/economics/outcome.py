"""The whole run with one layout on one cluster: storage, goodput, wall time and cost; also on other sizes and other
hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from craton.infrastructure import Cluster, cluster_of
from craton.infrastructure.catalog import instance
from craton.planning.calibration import predict
from craton.planning.economics.cost import billed_instances
from craton.planning.economics.goodput import expected_goodput
from craton.planning.economics.storage import checkpoint_bytes, data_bytes_per_token, storage_plan
from craton.planning.fitting import Prediction
from craton.planning.result import StoragePlan
from craton.planning.rollouts import step_extras
from craton.planning.search import Candidate, search
from craton.planning.setting import Setting, setting_of, tokens_of_step
from craton.planning.step import adapter_parameters, compose, evaluation_terms
from craton.planning.suite_evaluations import suite_plan

OTHER_HARDWARE = ("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge")
DEFAULT_CHECKPOINT_SECONDS = 1800.0  # for a job that names no checkpoint tier
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class RunOutcome:
    """The whole run with one layout on one cluster."""

    setting: Setting
    candidate: Candidate
    prediction: Prediction
    step_seconds: float  # data stalls and blocked checkpoint seconds included
    goodput: float
    run_seconds: float
    cost_dollars: float | None


def outcome_of(setting: Setting, candidate: Candidate) -> RunOutcome:
    """Return run time and cost with failures, for one candidate."""
    prediction = predict(setting.profile, candidate.terms)
    storage = storage_of(setting, candidate, prediction.seconds)
    data, blocked = stalls(setting, storage, prediction.seconds)
    steps = setting.job.steps or 1
    extras = step_extras(setting, candidate, prediction.seconds)
    productive = prediction.seconds + data + extras.seconds
    evaluate = evaluate_seconds(setting, candidate, prediction.seconds)
    share = expected_goodput(
        setting.cluster,
        setting.cluster.num_nodes,
        storage.tiers,
        step_seconds=productive,
        run_seconds=steps * productive,
        peer=setting.job.checkpoint.peer != "off",
        replicate=candidate.layout.replicate,
    )
    run_seconds = (steps * (productive + evaluate) + extras.once_seconds) / max(share, 1e-6)
    cost = None
    if setting.cluster.price:
        count = billed_instances(setting.cluster.instance, setting.cluster.num_nodes + setting.job.spares)
        cost = setting.cluster.price.dollars_per_hour * count * run_seconds / 3600.0
    return RunOutcome(setting, candidate, prediction, productive + blocked, share, run_seconds, cost)


def evaluate_seconds(setting: Setting, candidate: Candidate, step_seconds: float) -> float:
    """Return the mean seconds of evaluation per step; `step_seconds` as predicted, including the scale."""
    evaluate = setting.job.train and setting.job.train.evaluate
    if not evaluate:
        return 0.0
    suite = suite_plan(setting, candidate)
    of_suite = suite.seconds / evaluate.every_steps if suite is not None else 0.0
    if not setting.job.validates:
        return of_suite
    constants = np.exp(np.array(setting.profile.log_constants))
    once = compose(evaluation_terms(candidate.terms, candidate.layout, evaluate.sequences), constants).step_seconds
    return of_suite + float(once) * step_seconds / candidate.step_seconds / evaluate.every_steps


def storage_of(setting: Setting, candidate: Candidate, step_seconds: float) -> StoragePlan:
    job, shape, cluster = setting.job, setting.shape, setting.cluster
    train = job.train
    assert train is not None
    lora_parameters = adapter_parameters(shape, train.lora.rank) if train.lora else 0.0
    cadence: dict[str, float] = {}
    for tier in job.checkpoint.tiers:
        name = "object" if tier.to.startswith("s3://") else "shared" if tier.to.startswith("/") else tier.to
        every_seconds = tier.every or (tier.every_steps * step_seconds if tier.every_steps else 0.0)
        if name in cluster.tiers and every_seconds:
            cadence[name] = min(every_seconds, cadence.get(name, math.inf))
    if not job.checkpoint.tiers and (durable := durable_tier(cluster)):
        cadence[durable] = DEFAULT_CHECKPOINT_SECONDS
    if isinstance(job.checkpoint.peer, float | int) and "peer" in cluster.tiers:
        cadence["peer"] = float(job.checkpoint.peer)
    streamed = any(path.startswith("s3://") for path, _ in job.data.mixture)
    return storage_plan(
        cluster,
        cluster.num_nodes,
        checkpoint_bytes(
            shape.parameters,
            job.precision,
            train.optimizer,
            lora_parameters,
            weights=train.weights,
            both_widths=setting.profile.traits.saves_both_widths,
        ),
        cadence,
        tokens_per_second=tokens_of_step(job) / step_seconds,
        bytes_per_token=data_bytes_per_token(shape.vocab),
        data_tier="object" if streamed and "object" in cluster.tiers else "",
        peer=job.checkpoint.peer != "off",
        replicate=candidate.layout.replicate,
        frozen_bytes=2.0 * shape.parameters if train.lora else 0.0,
    )


def durable_tier(cluster: Cluster) -> str:
    """Return the assumed checkpoint tier of a job that names none."""
    return next((name for name in ("shared", "object", "nvme") if name in cluster.tiers), "")


def stalls(setting: Setting, storage: StoragePlan, step_seconds: float) -> tuple[float, float]:
    """Return (mean seconds a step waits for data, mean seconds a step is blocked by checkpoints)."""
    needed = storage.data_bytes_per_second * step_seconds
    data = max(0.0, needed / storage.data_limit_bytes_per_second - step_seconds)
    blocked = sum(
        tier.blocked_seconds / tier.every_seconds * step_seconds for tier in storage.tiers if tier.every_seconds
    )
    return data, blocked


def scaling_outcomes(setting: Setting, chosen: Candidate) -> list[RunOutcome]:
    """Return the same layout family on other numbers of nodes; none where nodes share GPUs, which stay the same."""
    outcomes: list[RunOutcome] = []
    if setting.cluster.instance.nodes_per_gpu > 1:
        return outcomes
    for factor in SCALES:
        nodes = round(setting.cluster.num_nodes * factor)
        if factor == 1.0 or nodes < 1 or abs(nodes - setting.cluster.num_nodes * factor) > 1e-9:
            continue
        other = _resized(setting, nodes)
        like = chosen.layout
        match = search(other.model, other.machine, other.profile, other.world, setting.job.precision, like)
        if match.candidates:
            outcomes.append(outcome_of(other, match.candidates[0]))
    return outcomes


def _resized(setting: Setting, nodes: int) -> Setting:
    name = f"{setting.cluster.name.rsplit(' x ', 1)[0]} x {nodes}"
    return replace(setting, cluster=replace(setting.cluster, num_nodes=nodes, name=name))


def other_hardware(setting: Setting, chosen: Candidate) -> list[RunOutcome]:
    """Return the same number of GPUs of other catalog instances, with similar layouts; none for a CPU or parts of a
    GPU."""
    own = setting.cluster.instance
    if own.gpu.generation == "cpu" or own.nodes_per_gpu > 1:
        return []
    outcomes = []
    for name in OTHER_HARDWARE:
        node = instance(name)
        if name == own.name or node.gpu.name == own.gpu.name or setting.world % node.num_gpus:
            continue
        if setting.job.precision in ("mxfp8", "nvfp4") and not node.gpu.flops.get("fp4"):
            continue
        other = setting_of(setting.job, cluster_of(name, setting.world // node.num_gpus))
        match = search(other.model, other.machine, other.profile, other.world, setting.job.precision, chosen.layout)
        if match.candidates:
            outcomes.append(outcome_of(other, match.candidates[0]))
    return outcomes
