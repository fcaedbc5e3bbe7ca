"""From a job to its plan: cluster, profile, layout, step, memory, storage, goodput, cost, and why.

`plan` is the face of the package: the command line, notebooks and the launcher call it alike. It needs no network and
no GPU; the same job, catalog and profile give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np

from craton.infrastructure import CatalogError, Cluster, cluster_of, instance, own_price, resolve_cluster
from craton.job import CratonError, Job, Layout, LayoutError, ModelShape, check_layout
from craton.planning.cost import billed_instances, cost_plan
from craton.planning.explain import PARTS, bottleneck, sensitivities, why_lost
from craton.planning.fitting import Prediction
from craton.planning.flops import flops_per_token
from craton.planning.goodput import expected_goodput, goodput_plan
from craton.planning.machine import Machine, machine_of
from craton.planning.memory import memory
from craton.planning.profiles import check_software, find_profile, interval_factor, predict
from craton.planning.quantities import percent
from craton.planning.result import Alternative, Plan, ScalingPoint, StoragePlan
from craton.planning.search import SAFE_SHARE, Candidate, Search, evaluate, search
from craton.planning.software import SoftwareProfile
from craton.planning.storage import checkpoint_bytes, data_bytes_per_token, storage_plan
from craton.planning.training import LORA_SHARE, REAL_IMBALANCE, StepModel, StepTimes, Workload, compose

PLANNED_KINDS = ("pretrain", "sft")
TOP = 5
WORTH_SAYING = 0.03  # of the step, from which a better layout than the user's is mentioned
OTHER_HARDWARE = ("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge")
DEFAULT_CHECKPOINT_SECONDS = 1800.0  # of a job that names no checkpoint tier
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
SECONDS_PER_DAY = 86400.0

Progress = Callable[[int, int, str], None]


class PlanError(CratonError):
    """A job that cannot be planned, and what to change."""


@dataclass(frozen=True)
class Bench:
    """A job on one cluster, ready to evaluate layouts."""

    job: Job
    shape: ModelShape
    cluster: Cluster
    machine: Machine
    profile: SoftwareProfile
    model: StepModel

    @property
    def world(self) -> int:
        return self.cluster.num_gpus


@dataclass(frozen=True)
class Outcome:
    """The whole run with one layout on one cluster."""

    bench: Bench
    candidate: Candidate
    prediction: Prediction
    step_seconds: float  # data stalls and blocked checkpoint seconds included
    goodput: float
    run_seconds: float
    cost_dollars: float | None


def plan(job: Job, *, today: date | None = None, progress: Progress | None = None) -> Plan:
    """Predict a job: the layout it names or the best one, and everything that follows from it."""
    today = today or date.today()
    _check(job)
    try:
        cluster = resolve_cluster(job.cluster, job.price)
    except CatalogError as error:
        raise PlanError(f"{job.where('cluster')}cluster: {error}") from None
    bench = _bench(job, cluster)
    if progress:
        progress(0, 3, f"layouts on {bench.cluster.name}")
    found = search(bench.model, bench.machine, bench.profile, bench.world, job.precision)
    chosen = _chosen(bench, found)
    if progress:
        progress(1, 3, "other sizes and other hardware")
    outcome = _outcome(bench, chosen)
    scaling = _scaling(bench, chosen)
    others = _other_hardware(bench, chosen)
    if progress:
        progress(2, 3, "the whole run")
    front = [_alternative(other, outcome) for other in _front([outcome, *scaling, *others])]
    runner_up = min(others, key=lambda other: _cost_key(other, "cost"), default=None)
    return _plan(
        outcome,
        found,
        today,
        scaling=scaling,
        front=front,
        runner_up=_alternative(runner_up, outcome) if runner_up else None,
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
    _check(job)
    clusters = _clusters(job, instances, gpu_counts)
    outcomes: list[Outcome] = []
    searches: dict[str, Search] = {}
    problems: list[str] = []
    for done, cluster in enumerate(clusters):
        if progress:
            progress(done, len(clusters), cluster.name)
        bench = _bench(job, cluster)
        found = search(bench.model, bench.machine, bench.profile, bench.world, job.precision)
        try:
            candidate = _chosen(bench, found)
        except PlanError as error:
            problems.append(f"{cluster.name}: {error}")
            continue
        if not candidate.fits:
            problems.append(f"{cluster.name}: {_nothing_fits(bench, found)}")
            continue
        searches[cluster.name] = found
        outcomes.append(_outcome(bench, candidate))
    if not outcomes:
        raise PlanError("no cluster of the search can run this job: " + "; ".join(problems[:3]))
    allowed = [
        outcome
        for outcome in outcomes
        if (deadline_seconds is None or outcome.run_seconds <= deadline_seconds)
        and (budget_dollars is None or (outcome.cost_dollars or math.inf) <= budget_dollars)
    ]
    if not allowed:
        raise PlanError(_nothing_allowed(outcomes, deadline_seconds, budget_dollars))
    best = min(allowed, key=lambda outcome: _cost_key(outcome, by))
    others = [outcome for outcome in allowed if outcome.bench.cluster.instance.name != best.bench.cluster.instance.name]
    runner_up = min(others, key=lambda outcome: _cost_key(outcome, by), default=None)
    same = [
        outcome
        for outcome in outcomes
        if outcome.bench.cluster.instance.name == best.bench.cluster.instance.name and outcome is not best
    ]
    return _plan(
        best,
        searches[best.bench.cluster.name],
        today,
        scaling=same,
        front=[_alternative(outcome, best) for outcome in _front(outcomes)],
        runner_up=_alternative(runner_up, best) if runner_up else None,
        more_warnings=problems,
    )


def _check(job: Job) -> None:
    """Whether the job can be planned at all, before anything is measured or searched."""
    if job.kind not in PLANNED_KINDS:
        raise PlanError(
            f"{job.where('kind')}kind {job.kind} cannot be planned; {' and '.join(PLANNED_KINDS)} can. "
            "`craton validate` checks the file"
        )
    if job.model_shape is None:
        raise PlanError(
            f"{job.where('model')}the model is a function, whose numbers only its author knows; to plan, give a "
            "preset, a config.json or inline numbers"
        )
    if job.total_tokens is None:
        raise PlanError(f"{job.where('train')}how long does the job train? give train.tokens or train.steps")
    check_software(job)


def _bench(job: Job, cluster: Cluster) -> Bench:
    shape = job.model_shape
    assert shape is not None
    machine = machine_of(cluster)
    profile = find_profile(job.software, machine.gpu)
    model = StepModel(
        shape,
        job.sequence,
        job.global_batch_sequences,
        machine.rates,
        machine.network,
        profile.traits,
        lora=bool(job.train and job.train.lora),
        imbalance=REAL_IMBALANCE if shape.is_moe else 1.0,
        host_link_bytes_per_second=machine.host_link_bytes_per_second,
    )
    return Bench(job, shape, cluster, machine, profile, model)


def _chosen(bench: Bench, found: Search) -> Candidate:
    """The layout the user wrote, else the best that fits; with nothing that fits, the smallest."""
    try:
        fixed = bench.job.fixed_layout(bench.world)
    except LayoutError as error:
        raise PlanError(f"{bench.job.where('layout')}{error}") from None
    if fixed is not None:
        problems = check_layout(
            fixed, bench.shape, bench.world, bench.model.global_batch_sequences, bench.model.sequence
        )
        if problems:
            raise PlanError(f"{bench.job.where('layout')}layout: " + "; ".join(problems))
        return evaluate(bench.model, bench.machine, bench.profile, fixed)
    if found.candidates:
        return found.candidates[0]
    if found.too_large:
        return min(found.too_large, key=lambda candidate: candidate.memory_bytes)
    raise PlanError(f"{bench.job.where('cluster')}{_nothing_fits(bench, found)}")


def _nothing_fits(bench: Bench, found: Search) -> str:
    if found.too_large:
        need = min(candidate.memory_bytes for candidate in found.too_large) / 2**30
        limit = bench.machine.gpu.memory_bytes / 2**30
        return f"no layout fits: the smallest needs {need:.0f} of {limit:.0f} GiB a GPU; use more GPUs or a larger card"
    batch = bench.model.global_batch_sequences
    return (
        f"no layout divides the job: {batch} sequences a step on {bench.world} GPUs; "
        "choose a batch that is a multiple of a divisor of the GPUs"
    )


def _nothing_allowed(outcomes: list[Outcome], deadline: float | None, budget: float | None) -> str:
    fastest = min(outcomes, key=lambda outcome: outcome.run_seconds)
    wanted = [f"a deadline of {deadline / SECONDS_PER_DAY:.1f} days"] if deadline else []
    priced = [outcome for outcome in outcomes if outcome.cost_dollars is not None]
    if budget:
        wanted.append(f"a budget of ${budget:,.0f}")
    cheapest = min(priced, key=lambda outcome: outcome.cost_dollars or math.inf, default=None)
    text = f"no cluster of the search meets {' and '.join(wanted)}; the fastest, {fastest.bench.cluster.name}, takes "
    text += f"{fastest.run_seconds / SECONDS_PER_DAY:.1f} days"
    if cheapest:
        text += f"; the cheapest, {cheapest.bench.cluster.name}, costs ${cheapest.cost_dollars:,.0f}"
    return text


def _storage(bench: Bench, candidate: Candidate, step_seconds: float) -> StoragePlan:
    job, shape, cluster = bench.job, bench.shape, bench.cluster
    train = job.train
    assert train is not None
    lora_parameters = LORA_SHARE * shape.parameters if train.lora else 0.0
    cadence: dict[str, float] = {}
    for tier in job.checkpoint.tiers:
        name = "object" if tier.to.startswith("s3://") else "shared" if tier.to.startswith("/") else tier.to
        if name in cluster.tiers:
            cadence[name] = min(tier.every, cadence.get(name, math.inf))
    if not job.checkpoint.tiers and (durable := _durable_tier(cluster)):
        cadence[durable] = DEFAULT_CHECKPOINT_SECONDS
    if isinstance(job.checkpoint.peer, float | int) and "peer" in cluster.tiers:
        cadence["peer"] = float(job.checkpoint.peer)
    path = str(job.data.path or "")
    return storage_plan(
        cluster,
        cluster.num_nodes,
        checkpoint_bytes(shape.parameters, job.precision, train.optimizer, lora_parameters),
        cadence,
        tokens_per_second=job.global_batch_tokens / step_seconds,
        bytes_per_token=data_bytes_per_token(shape.vocab),
        data_tier="object" if path.startswith("s3://") and "object" in cluster.tiers else "",
        peer=job.checkpoint.peer != "off",
        replicate=candidate.layout.replicate,
        frozen_bytes=2.0 * shape.parameters if train.lora else 0.0,
    )


def _durable_tier(cluster: Cluster) -> str:
    """Where a job that names no tier is taken to save."""
    return next((name for name in ("shared", "object", "nvme") if name in cluster.tiers), "")


def _outcome(bench: Bench, candidate: Candidate) -> Outcome:
    """Run time and cost with failures, for one candidate."""
    prediction = predict(bench.profile, candidate.terms)
    storage = _storage(bench, candidate, prediction.seconds)
    data, blocked = _stalls(bench, storage, prediction.seconds)
    steps = bench.job.steps or 1
    productive = prediction.seconds + data
    share = expected_goodput(
        bench.cluster,
        bench.cluster.num_nodes,
        storage.tiers,
        step_seconds=productive,
        run_seconds=steps * productive,
        peer=bench.job.checkpoint.peer != "off",
        replicate=candidate.layout.replicate,
    )
    run_seconds = steps * productive / max(share, 1e-6)
    cost = None
    if bench.cluster.price:
        count = billed_instances(bench.cluster.instance, bench.cluster.num_nodes)
        cost = bench.cluster.price.dollars_per_hour * count * run_seconds / 3600.0
    return Outcome(bench, candidate, prediction, productive + blocked, share, run_seconds, cost)


def _stalls(bench: Bench, storage: StoragePlan, step_seconds: float) -> tuple[float, float]:
    """(seconds a step waits for data, seconds a step is blocked by checkpoints, in the mean)"""
    needed = storage.data_bytes_per_second * step_seconds
    data = max(0.0, needed / storage.data_limit_bytes_per_second - step_seconds)
    blocked = sum(
        tier.blocked_seconds / tier.every_seconds * step_seconds for tier in storage.tiers if tier.every_seconds
    )
    return data, blocked


def _plan(
    outcome: Outcome,
    found: Search,
    today: date,
    *,
    scaling: Sequence[Outcome],
    front: list[Alternative],
    runner_up: Alternative | None,
    more_warnings: Sequence[str] = (),
) -> Plan:
    bench, candidate, prediction = outcome.bench, outcome.candidate, outcome.prediction
    job, shape, cluster, layout = bench.job, bench.shape, bench.cluster, candidate.layout
    constants = np.exp(np.array(bench.profile.log_constants))
    times = compose(candidate.terms, constants)
    scale = prediction.seconds / float(times.step_seconds)
    storage = _storage(bench, candidate, prediction.seconds)
    data, blocked = _stalls(bench, storage, prediction.seconds)
    productive = prediction.seconds + data
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
    run_seconds = steps * productive / goodput.goodput
    spread = interval_factor(prediction)
    low_factor = math.exp(math.hypot(math.log(spread), math.log(goodput.goodput_high / goodput.goodput)))
    high_factor = math.exp(math.hypot(math.log(spread), math.log(goodput.goodput / max(goodput.goodput_low, 1e-9))))
    tokens = job.total_tokens or 0.0
    cost, cost_warnings = cost_plan(
        cluster.price,
        billed_instances(cluster.instance, cluster.num_nodes),
        run_seconds,
        run_seconds / low_factor,
        run_seconds * high_factor,
        tokens,
        today,
    )
    traits = bench.profile.traits
    need = memory(_workload(bench, layout), traits, bench.machine.node_gpus, chunked_head=traits.chunked_head)
    parts = _parts(times, scale, data, blocked)
    step_seconds = sum(sum(entries.values()) for entries in parts.values())
    flops = flops_per_token(shape, job.sequence, bench.model.lora)
    tokens_per_second = job.global_batch_tokens / step_seconds
    peak = cluster.instance.gpu.peak_flops(layout.precision)
    limit = bench.machine.gpu.memory_bytes
    return Plan(
        job=job.name,
        kind=job.kind,
        model=shape,
        cluster=cluster,
        layout=layout,
        profile=bench.profile.label,
        calibrated=bench.profile.calibrated and _same_card(bench),
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
        memory_bytes=need.total_bytes,
        memory_limit_bytes=limit,
        memory_parts=need.parts,
        memory_instants=need.instants,
        storage=storage,
        goodput=goodput,
        cost=cost,
        run_seconds=run_seconds,
        run_seconds_low=run_seconds / low_factor,
        run_seconds_high=run_seconds * high_factor,
        bottleneck=bottleneck(
            times, layout, bench.machine, need.total_bytes / limit, goodput.goodput, data / step_seconds
        ),
        alternatives=_alternatives(bench, candidate, found, constants),
        runner_up=runner_up,
        scaling=_scaling_points([outcome, *scaling]),
        front=front,
        sensitivities=sensitivities(bench.model, bench.machine, bench.profile, candidate),
        layouts_evaluated=found.evaluated,
        warnings=[
            *_warnings(bench, candidate),
            *_better_layout(candidate, found),
            *storage.warnings,
            *goodput.warnings,
            *cost_warnings,
            *more_warnings,
        ],
    )


def _workload(bench: Bench, layout: Layout) -> Workload:
    model = bench.model
    return Workload(model.shape, layout, model.sequence, model.global_batch_sequences, model.lora, model.imbalance)


def _parts(times: StepTimes, scale: float, data: float, blocked: float) -> dict[str, dict[str, float]]:
    """Phase → part → seconds, without parts that take no time."""
    parts: dict[str, dict[str, float]] = {"data": {"waiting for data": data} if data > 0 else {}}
    for phase, names in PARTS.items():
        seconds = {text: float(getattr(times, name)) * scale for name, text in names.items()}
        parts[phase] = {text: value for text, value in seconds.items() if value > 0}
    parts["checkpoint"] = {"blocked by saves": blocked} if blocked > 0 else {}
    return parts


def _warnings(bench: Bench, candidate: Candidate) -> list[str]:
    found = []
    if not candidate.fits:
        need, limit = candidate.memory_bytes / 2**30, bench.machine.gpu.memory_bytes / 2**30
        found.append(f"does not fit: needs {need:.1f} of {limit:.1f} GiB a GPU; use more GPUs or a larger card")
    elif candidate.memory_bytes > SAFE_SHARE * bench.machine.gpu.memory_bytes:
        found.append("fits only just: the memory model may be wrong by more than what is left")
    if candidate.layout.precision not in _precisions(bench):
        found.append(
            f"{bench.machine.gpu.name} has no matrix unit for {candidate.layout.precision}; planned at the next wider "
            "precision's rate"
        )
    if not _same_card(bench):
        found.append(f"the profile {bench.profile.name} was calibrated on {bench.profile.gpu}, not on this card")
    placement, leaf = bench.job.placement, bench.cluster.leaf_nodes
    if placement and placement.within == "leaf" and leaf and bench.cluster.num_nodes > leaf:
        found.append(
            f"placement within leaf cannot hold: the job has {bench.cluster.num_nodes} nodes, a leaf {leaf}; "
            "planned across leaves"
        )
    if not bench.job.checkpoint.tiers and (durable := _durable_tier(bench.cluster)):
        found.append(
            f"the job names no checkpoint tier: planned as if it saved to {durable} every "
            f"{DEFAULT_CHECKPOINT_SECONDS / 60:.0f} min"
        )
    if bench.shape.is_moe:
        share = f"{100 * (REAL_IMBALANCE - 1):.0f} %"
        found.append(
            f"experts are taken to be {share} out of balance; an untrained router is far worse, and published runs "
            "force balance"
        )
    return found


def _same_card(bench: Bench) -> bool:
    return bench.profile.gpu in ("", bench.machine.gpu.name)


def _better_layout(candidate: Candidate, found: Search) -> list[str]:
    """A layout the user fixed, when the search knows a clearly faster one."""
    best = found.candidates[0] if found.candidates else candidate
    gain = 1.0 - best.step_seconds / candidate.step_seconds
    return [f"layout auto would be {percent(gain)} faster: {best.layout}"] if gain > WORTH_SAYING else []


def _precisions(bench: Bench) -> set[str]:
    flops = bench.machine.gpu.flops
    known = {"fp32"} | ({"fp16", "bf16"} if flops.get("fp16") or flops.get("bf16") else set())
    return known | ({"fp8", "mxfp8"} if flops.get("fp8") else set()) | ({"nvfp4"} if flops.get("fp4") else set())


def _alternatives(bench: Bench, chosen: Candidate, found: Search, constants: np.ndarray) -> list[Alternative]:
    """The best layouts that differ in more than a detail, and the best that memory rules out."""
    winner_times = compose(chosen.terms, constants)
    seen = {_kind(chosen.layout)}
    losers = []
    for candidate in found.candidates:
        if candidate.layout != chosen.layout and _kind(candidate.layout) not in seen:
            seen.add(_kind(candidate.layout))
            losers.append(candidate)
        if len(losers) == TOP - 1:
            break
    faster = [candidate for candidate in found.too_large if candidate.step_seconds < chosen.step_seconds]
    losers += faster[:1]
    steps = bench.job.steps or 1
    outcomes = [_outcome(bench, loser) for loser in losers]
    return [
        Alternative(
            cluster=bench.cluster.name,
            layout=loser.layout,
            step_seconds=outcome.step_seconds,
            memory_bytes=loser.memory_bytes,
            run_seconds=outcome.run_seconds if loser.fits else steps * loser.step_seconds,
            cost_dollars=outcome.cost_dollars,
            reason=why_lost(loser, chosen, compose(loser.terms, constants), winner_times),
            fits=loser.fits,
            goodput=outcome.goodput,
        )
        for loser, outcome in zip(losers, outcomes, strict=True)
    ]


def _kind(layout: Layout) -> tuple[int, ...]:
    return (layout.pp, layout.replicate, layout.fsdp, layout.cp, layout.tp, layout.ep, layout.zero)


def _scaling(bench: Bench, chosen: Candidate) -> list[Outcome]:
    """The same layout family on other numbers of nodes."""
    outcomes = []
    for factor in SCALES:
        nodes = round(bench.cluster.num_nodes * factor)
        if factor == 1.0 or nodes < 1 or abs(nodes - bench.cluster.num_nodes * factor) > 1e-9:
            continue
        other = _resized(bench, nodes)
        like = chosen.layout
        found = search(other.model, other.machine, other.profile, other.world, bench.job.precision, like)
        if found.candidates:
            outcomes.append(_outcome(other, found.candidates[0]))
    return outcomes


def _resized(bench: Bench, nodes: int) -> Bench:
    name = f"{bench.cluster.name.rsplit(' x ', 1)[0]} x {nodes}"
    return replace(bench, cluster=replace(bench.cluster, num_nodes=nodes, name=name))


def _other_hardware(bench: Bench, chosen: Candidate) -> list[Outcome]:
    """The same number of GPUs of other catalog instances, laid out alike."""
    own = bench.cluster.instance
    if own.gpu.generation == "cpu":
        return []
    outcomes = []
    for name in OTHER_HARDWARE:
        node = instance(name)
        if name == own.name or node.gpu.name == own.gpu.name or bench.world % node.num_gpus:
            continue
        if bench.job.precision in ("mxfp8", "nvfp4") and not node.gpu.flops.get("fp4"):
            continue
        other = _bench(bench.job, cluster_of(name, bench.world // node.num_gpus))
        found = search(other.model, other.machine, other.profile, other.world, bench.job.precision, chosen.layout)
        if found.candidates:
            outcomes.append(_outcome(other, found.candidates[0]))
    return outcomes


def _scaling_points(outcomes: Sequence[Outcome]) -> list[ScalingPoint]:
    points = [
        ScalingPoint(
            num_gpus=outcome.bench.world,
            step_seconds=outcome.step_seconds,
            tokens_per_second=outcome.bench.job.global_batch_tokens / outcome.step_seconds,
            run_seconds=outcome.run_seconds,
            cost_dollars=outcome.cost_dollars,
            layout=outcome.candidate.layout,
            cluster=outcome.bench.cluster.name,
        )
        for outcome in outcomes
    ]
    return sorted(points, key=lambda point: point.num_gpus)


def _front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """All priced candidates in order of run time, to show which ones nothing beats in both time and cost."""
    return sorted(outcomes, key=lambda outcome: outcome.run_seconds)


def _alternative(outcome: Outcome, best: Outcome) -> Alternative:
    return Alternative(
        cluster=outcome.bench.cluster.name,
        layout=outcome.candidate.layout,
        step_seconds=outcome.step_seconds,
        memory_bytes=outcome.candidate.memory_bytes,
        run_seconds=outcome.run_seconds,
        cost_dollars=outcome.cost_dollars,
        reason=_compared(outcome, best),
        fits=outcome.candidate.fits,
        goodput=outcome.goodput,
    )


def _compared(outcome: Outcome, best: Outcome) -> str:
    if outcome is best:
        return "chosen"
    texts = []
    time_ratio = outcome.run_seconds / best.run_seconds
    texts.append(_ratio(time_ratio, "longer", "shorter", "as long"))
    if outcome.cost_dollars is not None and best.cost_dollars:
        texts.append(_ratio(outcome.cost_dollars / best.cost_dollars, "dearer", "cheaper", "as dear"))
    return ", ".join(texts)


def _ratio(ratio: float, more: str, less: str, same: str) -> str:
    if 0.99 < ratio < 1.01:
        return same
    if ratio > 2.0 or ratio < 0.5:
        return f"{max(ratio, 1 / ratio):.1f} × {more if ratio > 1 else less}"
    return f"{100 * abs(ratio - 1):.0f} % {more if ratio > 1 else less}"


def _cost_key(outcome: Outcome, by: str) -> tuple[float, float]:
    cost = outcome.cost_dollars if outcome.cost_dollars is not None else math.inf
    if by == "time":
        return (outcome.run_seconds, cost)
    if by == "gpus":
        return (float(outcome.bench.world), outcome.run_seconds)
    return (cost, outcome.run_seconds)


def _clusters(job: Job, instances: Sequence[str], gpu_counts: Sequence[int]) -> list[Cluster]:
    """Whole nodes of every instance in every size; the job's own price holds for the instance it names."""
    clusters = []
    for name in instances:
        node = instance(name)
        sizes = [count // node.num_gpus for count in gpu_counts if count % node.num_gpus == 0]
        own = job.price if node.name == job.cluster.instance else None
        clusters += [cluster_of(name, size, price=own_price(own)) if own else cluster_of(name, size) for size in sizes]
    if not clusters:
        raise PlanError(
            f"no cluster to search: {', '.join(map(str, gpu_counts))} GPUs are no whole nodes of {', '.join(instances)}"
        )
    return clusters
