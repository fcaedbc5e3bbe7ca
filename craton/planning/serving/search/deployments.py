"""Plan a load: the deployments that could serve it, and the cheapest that keeps all latency limits.

Without a number of GPUs, every layout gets as many replicas as the load needs within the limits: the fewest GPUs. With
one, it gets all of them: the best use. A load without a rate or users is the largest that the GPUs hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from craton import formatting
from craton.infrastructure import CatalogError, Cluster, cluster_of, resolve_cluster
from craton.job import Job
from craton.job.model import ModelShape
from craton.job.sections.serving import LengthsSection, LoadSection, SloSection
from craton.planning.rates import MachineRates, machine_of
from craton.planning.serving.load import ServedLoad, TokenLengths
from craton.planning.serving.planner import PlannedLoad, ServePlan
from craton.planning.serving.profile import (
    OWN_ENGINE,
    EngineProfile,
    EngineProfileError,
    find_engine_profile,
    unmeasured_version,
)
from craton.planning.serving.search.curves import curve_points, front_points
from craton.planning.serving.search.drafts import planned_drafts
from craton.planning.serving.search.evaluate import Limits, evaluate, largest_load
from craton.planning.serving.search.pools import pooled_curve, pooled_deployment
from craton.planning.serving.search.replicas import ServedCandidates, candidates_of
from craton.planning.serving.search.result import Benchmark, Deployment, LoadPlan, PlannedDrafts, best_of_each
from craton.planning.serving.search.rows import deployment_rows, latency_intervals
from craton.planning.serving.search.stated_layout import check_stated_layout, has_pools, no_fit_text
from craton.planning.serving.search.tiers import kv_tiers
from craton.planning.setting import PlanError

HEADROOM = 0.9  # of the saturation rate, where no latency is limited
SHOWN = 12  # deployments in a plan
BENCHMARK_REQUESTS = 100  # of `craton bench serve`, where nothing else is said
MAX_REPLICAS = 100_000_000  # of a load that no cluster holds
CHOICES = ("cost", "gpus", "time")


@dataclass(frozen=True)
class _Setting:
    """One kind of machine with its candidates."""

    cluster: Cluster
    machine: MachineRates
    profile: EngineProfile
    candidates: ServedCandidates


def plan_load(
    job: Job,
    load: LoadSection | None = None,
    slo: SloSection | None = None,
    *,
    instances: Sequence[str] = (),
    gpus: int | None = None,
    by: str = "",
    cluster: Cluster | None = None,
) -> LoadPlan:
    """Return the plan for the load and the limits of the job, or those given. PlanError if the model fits nowhere."""
    serve, shape = job.serve, job.model_shape
    assert serve is not None
    assert shape is not None
    section, limits = load or serve.load or LoadSection(), (slo or serve.slo).limits
    asked = served_load(section)
    check_stated_layout(job, shape)
    tried = [_setting(job, shape, each, asked) for each in _clusters(job, instances, cluster)]
    settings = [setting for setting in tried if setting is not None]
    if not settings:
        raise PlanError(job.where("model") + no_fit_text(job, shape, ", ".join(instances) or str(job.cluster)))
    if gpus is None and asked.rate is None and asked.concurrency is None:
        gpus = max(settings[0].cluster.num_gpus, (serve.replicas or 1) * _fewest(settings[:1]))
    rows: list[Deployment] = []
    for setting in settings:
        rows += _rows(setting, asked, limits, gpus, serve.replicas)
        if setting.profile.engine != OWN_ENGINE and asked.rate is not None and has_pools(job):
            pooled = pooled_deployment(
                setting.candidates,
                setting.cluster,
                setting.machine,
                asked,
                limits,
            )
            rows += [pooled] if pooled is not None and (gpus is None or pooled.gpus <= gpus) else []
    if not rows and not any(_roomy(setting.candidates, asked) for setting in settings):
        most = int(max(_tokens_per_rank(setting.candidates).max() for setting in settings))
        raise PlanError(
            f"{job.where('serve', 'load')}the longest request has {asked.input.longest + asked.output.longest:,.0f} "
            f"tokens, and the KV cache of no layout holds more than {most:,}; use a lower serve.kv_precision or "
            "serve.precision, more tp, or instances with more GPU memory (--instances)"
        )
    if not rows:
        least, stated = _fewest(settings), serve.replicas
        if stated:
            raise PlanError(
                f"--gpus {gpus} is too few: {stated} replicas (serve.replicas) need {stated * least}; give more GPUs, "
                "or remove serve.replicas"
            )
        raise PlanError(f"--gpus {gpus} is too few: the smallest layout needs {least}; give more GPUs")
    by = by or ("cost" if all(row.dollars_per_hour is not None for row in rows) else "gpus")
    rows.sort(key=lambda row: _rank(row, by, gpus))
    notes = _notes(rows, settings)
    rows = _without_equals(rows)
    chosen = rows[0]
    home = next(setting for setting in settings if setting.cluster.instance.name == chosen.instance)
    return LoadPlan(
        model=shape.name,
        engine=home.profile.name,
        precision=serve.precision,
        attention_precision=home.candidates.formats.stored.attention_weights,
        activation_precision=home.candidates.formats.activations,
        kv_precision=home.candidates.formats.stored.kv,
        load=section,
        slo=_by_latency(limits),
        by=by,
        gpus_limit=gpus,
        chosen=chosen,
        deployments=best_of_each(rows, SHOWN),
        compared=len(rows),
        curve=(curve_points if chosen.prefill is None else pooled_curve)(home.candidates, asked, chosen),
        front=[point for each in settings for point in front_points(each.candidates, each.cluster, asked)],
        tiers=kv_tiers(home.candidates, home.cluster.instance, asked, chosen),
        basis=home.profile.source,
        log_deviation=home.candidates.log_deviation,
        price_text=_price_text(home.cluster),
        benchmark=_benchmark(home, asked, chosen),
        drafts=_drafts(home, job, asked, chosen),
        notes=notes,
        warnings=[*_versions(job, settings), *_absences(instances, rows), *_far_reductions(home, chosen)],
    )


def with_planned_load(plan: ServePlan, job: Job) -> ServePlan:
    """Return a server's plan with the predictions for its load; unchanged without a load, or on a CPU."""
    section = job.serve.load if job.serve else None
    if section is None or (section.rate is None and section.concurrency is None):
        return plan
    if plan.cluster.instance.gpu.generation == "cpu":
        return plan
    load = served_load(section)
    setting = _setting(job, plan.model, plan.cluster, load)
    if setting is None or plan.layout not in setting.candidates.layouts:
        return plan
    alone = setting.candidates.only([setting.candidates.layouts.index(plan.layout)])
    found = evaluate(alone, load, np.ones(1))
    row = deployment_rows(alone, plan.cluster, load, {}, np.ones(1), np.zeros(1), found)[0]
    planned = PlannedLoad(
        rate=row.rate,
        saturation_rate=row.max_rate.value,
        ttft_seconds=row.ttft["mean"].value,
        ttft_seconds_low=row.ttft["mean"].low,
        ttft_seconds_high=row.ttft["mean"].high,
        ttft_p95_seconds=row.ttft["p95"].value,
        tpot_seconds=row.tpot["mean"].value,
        tpot_seconds_low=row.tpot["mean"].low,
        tpot_seconds_high=row.tpot["mean"].high,
        tokens_per_second=row.tokens_per_second.value,
    )
    return replace(plan, load=planned)


def served_load(section: LoadSection) -> ServedLoad:
    """Return the load with its distributions of lengths."""
    return ServedLoad(
        input=_lengths(section.input),
        output=_lengths(section.output),
        rate=section.rate,
        concurrency=section.concurrency,
        prefix_hits=section.prefix_hits,
        acceptance=section.acceptance,
        burstiness=1.0 / section.burstiness,  # the squared coefficient of variation of a gamma distribution
        requests=section.requests,
    )


def _lengths(section: LengthsSection) -> TokenLengths:
    if section.min is not None and section.max is not None:
        return TokenLengths.uniform(section.min, section.max)
    assert section.mean is not None
    if section.p95 is not None and section.p95 > section.mean:
        return TokenLengths.lognormal(section.mean, section.p95)
    return TokenLengths.fixed(section.mean)


def _clusters(job: Job, instances: Sequence[str], cluster: Cluster | None) -> list[Cluster]:
    try:
        if instances:
            return [cluster_of(name, 1) for name in instances]
        return [cluster or resolve_cluster(job.cluster, job.price)]
    except CatalogError as error:
        raise PlanError(f"--instances: {error}" if instances else f"{job.where('cluster')}cluster: {error}") from None


def _setting(job: Job, shape: ModelShape, cluster: Cluster, load: ServedLoad) -> _Setting | None:
    """Return the candidates on a kind of machine; None if the model is too large for it."""
    gpu = cluster.instance.gpu
    if gpu.generation == "cpu":
        raise PlanError(
            f"{job.where('cluster')}a load is planned for GPUs, and {cluster.name} has none; use --instances, e.g. "
            "--instances p5.48xlarge"
        )
    machine = machine_of(cluster)
    assert job.serve is not None
    try:
        profile = find_engine_profile(job.software, gpu)
    except EngineProfileError as error:
        raise PlanError(f"{job.where('software')}software: {error}") from None
    candidates = candidates_of(job, shape, machine, profile, load)
    return None if candidates is None else _Setting(cluster, machine, profile, candidates)


def _rows(
    setting: _Setting, load: ServedLoad, limits: Limits, gpus: int | None, stated: int | None
) -> list[Deployment]:
    candidates = setting.candidates
    keep = _roomy(candidates, load)
    if gpus is not None:
        keep = [index for index in keep if candidates.layouts[index].replica_gpus * (stated or 1) <= gpus]
    if not keep:
        return []
    candidates = candidates.only(keep)
    sizes = np.array([layout.replica_gpus for layout in candidates.layouts])
    most = largest_load(candidates, load, limits)
    wanted: Any = load.concurrency if load.concurrency is not None else load.rate
    if stated is not None:
        replicas = np.full(len(sizes), stated)
    elif gpus is not None:
        replicas = gpus // sizes
    else:
        # Layouts that keep no limit get what a load without limits needs, to show how near they come.
        enough = np.where(most > 0.0, most, largest_load(candidates, load, {}))
        enough = enough * (1.0 if limits or load.concurrency is not None else HEADROOM)
        replicas = np.clip(np.ceil(wanted / enough - 1e-9), 1, MAX_REPLICAS).astype(int)
    if wanted is None:
        # Every layout at its own largest rate.
        rates = np.where(most > 0.0, most, 0.5 * largest_load(candidates, load, {})) * (1.0 if limits else HEADROOM)
        rows = []
        for index, rate in enumerate(rates):
            only = candidates.only([index])
            alone = replace(load, rate=float(rate) * int(replicas[index]))
            found = evaluate(only, alone, replicas[[index]])
            rows += deployment_rows(only, setting.cluster, alone, limits, replicas[[index]], most[[index]], found)
        return rows
    found = evaluate(candidates, load, replicas)
    return deployment_rows(candidates, setting.cluster, load, limits, replicas, most, found)


def _roomy(candidates: ServedCandidates, load: ServedLoad) -> list[int]:
    """Return the candidates whose KV cache holds the longest request."""
    longest = load.input.longest + load.output.longest
    return [index for index, tokens in enumerate(_tokens_per_rank(candidates)) if tokens >= longest]


def _tokens_per_rank(candidates: ServedCandidates) -> np.ndarray:
    return np.asarray(np.asarray(candidates.replica.steps.kv_tokens) / np.asarray(candidates.replica.attention_dp))


def _rank(row: Deployment, by: str, gpus: int | None) -> tuple[float, ...]:
    cost = row.dollars_per_hour if row.dollars_per_hour is not None else math.inf
    latency = row.e2e["mean"].value
    missing = 0.0 if row.holds else 1.0
    if gpus is not None and by != "time":
        return (missing, row.distance, -row.slo_rate, cost, latency)
    first = {"cost": cost, "gpus": float(row.gpus), "time": latency}[by]
    return (missing, row.distance, first, float(row.gpus) if by == "cost" else cost, -row.max_rate.value, latency)


def _without_equals(rows: Sequence[Deployment]) -> list[Deployment]:
    """Return one row of those that differ in `ep` only and have the same numbers: a stage has its experts on the same
    GPUs. With attention data parallel it is that with `ep`, as engines deploy it."""
    found: dict[tuple[object, ...], Deployment] = {}
    for row in rows:
        prefill = replace(row.prefill, ep=1) if row.prefill else None
        key = (row.instance, replace(row.layout, ep=1), prefill, row.ttft["p95"], row.tpot["p95"], row.max_rate)
        other = found.setdefault(key, row)
        prefers_ep = row.layout.attention_dp > 1
        if (row.layout.ep > other.layout.ep) == prefers_ep and row.layout.ep != other.layout.ep:
            found[key] = row
    return list(found.values())


def _versions(job: Job, settings: Sequence[_Setting]) -> list[str]:
    """Name the GPUs on which the stated version of the engine was not measured."""
    gpus = {setting.machine.gpu.name: setting.machine.gpu for setting in settings}
    return [text for gpu in gpus.values() if (text := unmeasured_version(job.software, gpu))]


def _far_reductions(setting: _Setting, chosen: Deployment) -> list[str]:
    """Warn of tensor parallelism across the network, which no measurement of the fit has."""
    domain = setting.machine.network.nvlink_domain
    widest = max(layout.tp for layout in (chosen.layout, chosen.prefill) if layout)
    if widest <= domain:
        return []
    return [
        f"tp {widest} leaves the NVLink domain of {domain} GPUs: the constants are fitted to no such server, so it may "
        "be far slower than planned; prefer pp, or attention_dp with ep"
    ]


def _absences(instances: Sequence[str], rows: Sequence[Deployment]) -> list[str]:
    """Name the instances without a deployment."""
    shown = {row.instance for row in rows}
    return [
        f"{name}: no deployment; the model, a request or a replica needs more than it has"
        for name in dict.fromkeys(instances)
        if name not in shown
    ]


def _benchmark(setting: _Setting, load: ServedLoad, chosen: Deployment) -> Benchmark | None:
    if load.concurrency is None or load.requests is not None:
        return None
    index = setting.candidates.layouts.index(replace(chosen.layout, replicas=1))
    requests = max(BENCHMARK_REQUESTS, load.concurrency)
    only, replicas = setting.candidates.only([index]), np.array([chosen.layout.replicas])
    found = evaluate(only, replace(load, requests=requests), replicas)
    return Benchmark(requests, latency_intervals(found.latencies.ttft, 0))


def _drafts(setting: _Setting, job: Job, load: ServedLoad, chosen: Deployment) -> PlannedDrafts | None:
    if not job.serve or not job.serve.draft_tokens:
        return None
    index = setting.candidates.layouts.index(replace(chosen.layout, replicas=1))
    steps = setting.candidates.only([index]).replica.steps
    return planned_drafts(job, steps, load.context_tokens, load.acceptance, chosen)


def _fewest(settings: Sequence[_Setting]) -> int:
    return min(layout.replica_gpus for setting in settings for layout in setting.candidates.layouts)


def _by_latency(limits: Limits) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for (name, statistic), seconds in limits.items():
        result.setdefault(name, {})[statistic] = seconds
    return result


def _price_text(cluster: Cluster) -> str:
    price = cluster.price
    if price is None:
        return "no price is known"
    hourly = formatting.dollars(price.dollars_per_hour)
    return f"{price.kind}, {hourly}/h per {cluster.instance.name}, price of {price.date}"


def _notes(rows: Sequence[Deployment], settings: Sequence[_Setting]) -> list[str]:
    """Return what expert parallelism inside one NVLink domain costs against across the network."""
    notes = []
    for setting in settings:
        domain, name = setting.machine.network.nvlink_domain, setting.cluster.instance.name
        here = [row for row in rows if row.instance == name and row.holds and row.prefill is None]
        inside = next((row for row in here if row.layout.stage_gpus <= domain and row.layout.ep > 1), None)
        across = next((row for row in here if row.layout.stage_gpus > domain and row.layout.ep > 1), None)
        if inside is None or across is None or inside.dollars_per_hour is None or across.dollars_per_hour is None:
            continue
        one, other = (formatting.dollars(row.dollars_per_hour) for row in (inside, across))
        more = across.dollars_per_hour - inside.dollars_per_hour
        change = f"{formatting.dollars(abs(more))}/h {'more' if more >= 0 else 'less'}"
        notes.append(
            f"{name}: ep {inside.layout.ep} inside one {setting.machine.domain_name} of {domain} GPUs "
            f"({inside.layout}) costs {one}/h, ep {across.layout.ep} across the network ({across.layout}) "
            f"{other}/h: {change}"
        )
    return notes
