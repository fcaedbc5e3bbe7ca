"""Plan a job: cluster, profile, layout, step, memory, storage, goodput, cost, and the reasons.

The command line, notebooks and the launcher all call `plan`. It needs no network and no GPU; the same job, catalog and
profile give the same plan. The exception is a local cluster of CPUs, whose plan depends on what else the machine runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date

import numpy as np

from craton import formatting
from craton.infrastructure import (
    CatalogError,
    Cluster,
    cluster_of,
    load_text,
    own_price,
    resolve_cluster,
    with_measured_host,
)
from craton.infrastructure.catalog import instance
from craton.job import Job
from craton.planning.calibration import UNKNOWN, interval_factor, own_runs
from craton.planning.comparison import by_run_time, cluster_alternative, layout_alternatives, preference, scaling_points
from craton.planning.economics import (
    DEFAULT_CHECKPOINT_SECONDS,
    RunOutcome,
    billed_instances,
    cost_plan,
    durable_tier,
    evaluate_seconds,
    goodput_plan,
    other_hardware,
    outcome_of,
    scaling_outcomes,
    stalls,
    storage_of,
)
from craton.planning.memory import memory
from craton.planning.report import PARTS, bottleneck, sensitivities
from craton.planning.result import Alternative, Plan
from craton.planning.rollouts import step_extras
from craton.planning.search import SAFE_SHARE, Candidate, Search, search
from craton.planning.setting import (
    PlanError,
    Setting,
    check_plannable,
    chosen_layout,
    nothing_fits,
    setting_of,
    tokens_of_step,
)
from craton.planning.step import REAL_IMBALANCE, StepTimes, compose, flops_per_token
from craton.planning.suite_evaluations import suite_plan
from craton.telemetry import ROLLOUT_PHASES

logger = logging.getLogger(__name__)

SLOW_PRECISION = 2.0  # times slower than fp32, from which a warning says so
WORTH_SAYING = 0.03  # share of the step by which a layout must beat the user's to be reported
SECONDS_PER_DAY = 86400.0

Progress = Callable[[int, int, str], None]


def plan(
    job: Job, *, cluster: Cluster | None = None, today: date | None = None, progress: Progress | None = None
) -> Plan:
    """Predict a job with the layout it names, or with the best one. `cluster` replaces the job's own cluster, for
    example with a part of it."""
    today = today or date.today()
    check_plannable(job)
    try:
        cluster = cluster or resolve_cluster(job.cluster, job.price, share_gpus=job.run.share_gpus)
    except CatalogError as error:
        raise PlanError(f"{job.where('cluster')}cluster: {error}") from None
    if cluster.num_gpus > 1 or (job.train and job.train.graphs == "off"):  # Python launches every kernel
        cluster = with_measured_host(cluster)
    setting = setting_of(job, cluster)
    layouts = _search(setting, progress)
    chosen = chosen_layout(setting, layouts)
    outcome = outcome_of(setting, chosen)
    scaling = scaling_outcomes(setting, chosen)
    others = other_hardware(setting, chosen)
    front = [cluster_alternative(other, outcome) for other in by_run_time([outcome, *scaling, *others])]
    runner_up = min(others, key=lambda other: preference(other, "cost"), default=None)
    return _plan(
        outcome,
        layouts,
        today,
        scaling=scaling,
        front=front,
        runner_up=cluster_alternative(runner_up, outcome) if runner_up else None,
    )


def plan_clusters(
    job: Job,
    instances: Sequence[str],
    gpu_counts: Sequence[int],
    *,
    by: str = "cost",
    deadline_seconds: float | None = None,
    budget_dollars: float | None = None,
    today: date | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Choose the cluster too: the best layout on every instance type and size, then the best of those."""
    today = today or date.today()
    check_plannable(job)
    clusters = _clusters(job, instances, gpu_counts)
    outcomes: list[RunOutcome] = []
    searches: dict[str, Search] = {}
    problems: list[str] = []
    for done, cluster in enumerate(clusters):
        setting = setting_of(job, cluster)
        layouts = _search(setting, progress, f"cluster {done + 1} of {len(clusters)}, ")
        try:
            candidate = chosen_layout(setting, layouts)
        except PlanError as error:
            problems.append(f"{cluster.name}: {error}")
            continue
        if not candidate.fits:
            problems.append(f"{cluster.name}: {nothing_fits(setting, layouts)}")
            continue
        searches[cluster.name] = layouts
        outcomes.append(outcome_of(setting, candidate))
    if not outcomes:
        raise PlanError("no cluster in the search can run this job: " + "; ".join(problems[:3]))
    allowed = [
        outcome
        for outcome in outcomes
        if (deadline_seconds is None or outcome.run_seconds <= deadline_seconds)
        and (budget_dollars is None or (outcome.cost_dollars or math.inf) <= budget_dollars)
    ]
    if not allowed:
        raise PlanError(_nothing_allowed(outcomes, deadline_seconds, budget_dollars))
    best = min(allowed, key=lambda outcome: preference(outcome, by))
    others = [
        outcome for outcome in allowed if outcome.setting.cluster.instance.name != best.setting.cluster.instance.name
    ]
    runner_up = min(others, key=lambda outcome: preference(outcome, by), default=None)
    same = [
        outcome
        for outcome in outcomes
        if outcome.setting.cluster.instance.name == best.setting.cluster.instance.name and outcome is not best
    ]
    return _plan(
        best,
        searches[best.setting.cluster.name],
        today,
        scaling=same,
        front=[cluster_alternative(outcome, best) for outcome in by_run_time(outcomes)],
        runner_up=cluster_alternative(runner_up, best) if runner_up else None,
        more_warnings=problems,
    )


def _search(setting: Setting, progress: Progress | None, prefix: str = "") -> Search:
    """Evaluate all layouts on the cluster: most of the time of a plan."""

    def report(done: int, total: int) -> None:
        if progress:
            progress(done, total, f"{prefix}layouts on {setting.cluster.name}")

    start = time.monotonic()
    found = search(
        setting.model, setting.machine, setting.profile, setting.world, setting.job.precision, progress=report
    )
    logger.info("searched layouts on %s in %.2f s", setting.cluster.name, time.monotonic() - start)
    return found


def _nothing_allowed(outcomes: list[RunOutcome], deadline: float | None, budget: float | None) -> str:
    fastest = min(outcomes, key=lambda outcome: outcome.run_seconds)
    wanted = [f"a deadline of {formatting.setting(deadline)}"] if deadline else []
    priced = [outcome for outcome in outcomes if outcome.cost_dollars is not None]
    if budget:
        wanted.append(f"a budget of {formatting.dollars(budget)}")
    cheapest = min(priced, key=lambda outcome: outcome.cost_dollars or math.inf, default=None)
    text = f"no cluster in the search meets {' and '.join(wanted)}; the fastest, {fastest.setting.cluster.name}, takes "
    text += f"{formatting.duration(fastest.run_seconds)}"
    if cheapest:
        text += f"; the cheapest, {cheapest.setting.cluster.name}, costs {formatting.dollars(cheapest.cost_dollars)}"
    return text


def _clusters(job: Job, instances: Sequence[str], gpu_counts: Sequence[int]) -> list[Cluster]:
    """Return whole-node clusters of every instance and size. The job's own price applies to the instance it names."""
    clusters = []
    for name in instances:
        node = instance(name)
        sizes = [count // node.num_gpus for count in gpu_counts if count % node.num_gpus == 0]
        own = job.price if node.name == job.cluster.instance else None
        clusters += [cluster_of(name, size, price=own_price(own)) if own else cluster_of(name, size) for size in sizes]
    if not clusters:
        raise PlanError(
            f"no cluster to search: {' or '.join(map(str, gpu_counts))} GPUs is not a whole number of "
            f"{' or '.join(instances)} nodes"
        )
    return clusters


def _plan(
    outcome: RunOutcome,
    layouts: Search,
    today: date,
    *,
    scaling: Sequence[RunOutcome],
    front: list[Alternative],
    runner_up: Alternative | None,
    more_warnings: Sequence[str] = (),
) -> Plan:
    setting, candidate, prediction = outcome.setting, outcome.candidate, outcome.prediction
    job, shape, cluster, layout = setting.job, setting.shape, setting.cluster, candidate.layout
    constants = np.exp(np.array(setting.profile.log_constants))
    times = compose(candidate.terms, constants)
    scale = prediction.seconds / float(times.step_seconds)
    storage = storage_of(setting, candidate, prediction.seconds)
    data, blocked = stalls(setting, storage, prediction.seconds)
    extras = step_extras(setting, candidate, prediction.seconds)
    productive = prediction.seconds + data + extras.seconds
    steps = job.steps or 1
    goodput = goodput_plan(
        cluster,
        cluster.num_nodes,
        storage.tiers,
        step_seconds=productive,
        run_seconds=steps * productive,
        peer=job.checkpoint.peer != "off",
        replicate=layout.replicate,
    )
    evaluate, suite = evaluate_seconds(setting, candidate, prediction.seconds), suite_plan(setting, candidate)
    run_seconds = (steps * (productive + evaluate) + extras.once_seconds) / goodput.goodput
    spread = interval_factor(prediction)
    low_factor = math.exp(math.hypot(math.log(spread), math.log(goodput.goodput_high / goodput.goodput)))
    high_factor = math.exp(math.hypot(math.log(spread), math.log(goodput.goodput / max(goodput.goodput_low, 1e-9))))
    tokens = steps * tokens_of_step(job) if job.rollout else job.total_tokens or 0.0
    cost, cost_warnings = cost_plan(
        cluster.price,
        billed_instances(cluster.instance, cluster.num_nodes + job.spares),
        run_seconds,
        run_seconds / low_factor,
        run_seconds * high_factor,
        tokens,
        today,
    )
    traits = setting.profile.traits
    need = memory(setting.model.workload(layout), traits, setting.machine.node_gpus)
    parts = _parts(times, scale, data, blocked, extras.parts)
    step_seconds = sum(sum(entries.values()) for entries in parts.values())
    flops = flops_per_token(shape, job.sequence, setting.model.lora)
    tokens_per_second = tokens_of_step(job) / step_seconds
    peak = cluster.instance.gpu.peak_flops(layout.precision)
    limit = setting.machine.gpu.memory_bytes
    return Plan(
        job=job.name,
        kind=job.kind,
        model=shape,
        cluster=cluster,
        layout=layout,
        profile=setting.profile.label,
        calibrated=setting.profile.calibrated and _same_card(setting),
        sequence=job.sequence,
        global_batch_sequences=job.global_batch_sequences,
        tokens=tokens,
        steps=steps,
        step_seconds=step_seconds,
        step_seconds_low=step_seconds / spread,
        step_seconds_high=step_seconds * spread,
        phases={phase: sum(entries.values()) for phase, entries in parts.items()},
        parts=parts,
        hidden_communication_seconds=float(times.hidden) * scale,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * flops / (peak * cluster.num_gpus),
        flops_per_token=flops,
        memory_bytes=need.total_bytes + extras.memory_bytes,
        memory_limit_bytes=limit,
        memory_parts={**need.parts, **extras.memory_parts},
        memory_instants={name: size + extras.memory_bytes for name, size in need.instants.items()},
        storage=storage,
        goodput=goodput,
        cost=cost,
        run_seconds=run_seconds,
        run_seconds_low=run_seconds / low_factor,
        run_seconds_high=run_seconds * high_factor,
        bottleneck=bottleneck(
            times,
            layout,
            setting.machine,
            (need.total_bytes + extras.memory_bytes) / limit,
            goodput.goodput,
            data / step_seconds,
            blocked / step_seconds,
            {phase: sum(extras.parts.get(phase, {}).values()) / step_seconds for phase in ROLLOUT_PHASES},
        ),
        alternatives=layout_alternatives(setting, candidate, layouts, constants),
        runner_up=runner_up,
        scaling=scaling_points([outcome, *scaling]),
        front=front,
        sensitivities=sensitivities(setting.model, setting.machine, setting.profile, candidate),
        layouts_evaluated=layouts.evaluated,
        evaluate_seconds=evaluate,
        rollout=extras.rollout,
        warnings=[
            *_warnings(setting, candidate),
            *extras.warnings,
            *(suite.notes if suite is not None else []),
            *_better_layout(candidate, layouts),
            *storage.warnings,
            *goodput.warnings,
            *cost_warnings,
            *more_warnings,
        ],
    )


def _parts(
    times: StepTimes, scale: float, data: float, blocked: float, extras: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Phase → part → seconds, without parts that take no time."""
    parts: dict[str, dict[str, float]] = {phase: dict(extras[phase]) for phase in ROLLOUT_PHASES if phase in extras}
    parts["data"] = {"waiting for data": data} if data > 0 else {}
    for phase, names in PARTS.items():
        seconds = {text: float(getattr(times, name)) * scale for name, text in names.items()}
        parts[phase] = {text: value for text, value in seconds.items() if value > 0} | dict(extras.get(phase, {}))
    parts["checkpoint"] = {"blocked by saves": blocked} if blocked > 0 else {}
    return parts


def _warnings(setting: Setting, candidate: Candidate) -> list[str]:
    result = []
    if not candidate.fits:
        need, limit = formatting.memory(candidate.memory_bytes), formatting.memory(setting.machine.gpu.memory_bytes)
        is_shared = setting.cluster.instance.nodes_per_gpu > 1
        advice = "use fewer ranks or a smaller model" if is_shared else "use more GPUs or GPUs with more memory"
        result.append(f"does not fit: needs {need} of {limit} per {'rank' if is_shared else 'GPU'}; {advice}")
    elif candidate.memory_bytes > SAFE_SHARE * setting.machine.gpu.memory_bytes:
        result.append("barely fits: the error of the memory model may exceed the free memory")
    if candidate.layout.precision not in _precisions(setting):
        result.append(
            f"{setting.machine.gpu.name} has no matrix unit for {candidate.layout.precision}; planned at the rate of "
            "the next wider precision"
        )
    if not _same_card(setting):
        result.append(f"the profile {setting.profile.name} was calibrated on {setting.profile.gpu}, not on this GPU")
    if setting.profile.name == UNKNOWN and setting.profile.calibrated:
        largest = max(run.gpus for run in own_runs())
        if candidate.layout.world > largest:
            result.append(
                f"the profile {UNKNOWN} was measured on {largest} GPU{'s' if largest > 1 else ''}: its communication "
                "constants come from other stacks"
            )
    result += _cpu_warnings(setting, candidate)
    placement, leaf = setting.job.placement, setting.cluster.leaf_nodes
    if placement and placement.within == "leaf" and leaf and setting.cluster.num_nodes > leaf:
        result.append(
            f"placement within one leaf is impossible: the job has {setting.cluster.num_nodes} nodes, a leaf has "
            f"{leaf}; planned across leaves"
        )
    if not setting.job.checkpoint.tiers and (durable := durable_tier(setting.cluster)):
        result.append(
            f"{setting.job.checkpoint.end_only_warning}; planned as if it saved to {durable} every "
            f"{formatting.setting(DEFAULT_CHECKPOINT_SECONDS)}"
        )
    if setting.shape.is_moe:
        share = formatting.percent(REAL_IMBALANCE - 1)
        result.append(
            f"assumes {share} expert imbalance; an untrained router is far worse, and published runs "
            "force balanced routing"
        )
    return result


def _cpu_warnings(setting: Setting, candidate: Candidate) -> list[str]:
    """Return what makes this machine's CPU slower than it could be: other processes, a precision without kernels."""
    card = setting.machine.gpu
    if card.cpu is None:
        return []
    result = []
    if card.cpu.load.is_busy:
        slower = card.cpu.parallel_slowdown
        result.append(f"this machine is busy: {load_text(card.cpu.load)}; ranks are planned {slower:.1f} × slower")
    precision = candidate.layout.precision
    ratio = card.flops["fp32"] / card.peak_flops(precision)
    if ratio > SLOW_PRECISION:
        result.append(
            f"{precision} matmuls of this CPU are {ratio:.0f} × slower than fp32, as measured; set train.precision: "
            "fp32"
        )
    return result


def _better_layout(candidate: Candidate, layouts: Search) -> list[str]:
    """Return a warning if the user fixed a layout and the search found a clearly faster one."""
    best = layouts.candidates[0] if layouts.candidates else candidate
    gain = 1.0 - best.step_seconds / candidate.step_seconds
    return [f"layout auto would be {formatting.percent(gain)} faster: {best.layout}"] if gain > WORTH_SAYING else []


def _same_card(setting: Setting) -> bool:
    return setting.profile.gpu in ("", setting.machine.gpu.name)


def _precisions(setting: Setting) -> set[str]:
    flops = setting.machine.gpu.flops
    supported = {"fp32"} | ({"fp16", "bf16"} if flops.get("fp16") or flops.get("bf16") else set())
    return supported | ({"fp8", "mxfp8"} if flops.get("fp8") else set()) | ({"nvfp4"} if flops.get("fp4") else set())
