"""Sentences and tables about a plan, shared by the terminal report and the HTML page.

Nothing is predicted here. Every function also works for a plan with parts missing: no price, no search, no failures.
"""

from __future__ import annotations

from datetime import date, timedelta

from craton import formatting
from craton.infrastructure import Cluster
from craton.job.layout import Layout
from craton.planning.economics import billed_instances
from craton.planning.result import (
    INTERVAL_LEVEL,
    Alternative,
    Plan,
    RecoveryPlan,
    ScalingPoint,
    Sensitivity,
    TierPlan,
)

INTERVAL_NAME = f"{formatting.percent(INTERVAL_LEVEL)} interval"
STALE_PRICE_DAYS = 90
_SMALLEST_PART = 0.005  # of the step; smaller parts are shown as one sum
_KIND_NAMES = {"pretrain": "Pre-training", "sft": "Fine-tuning", "dpo": "Preference tuning", "grpo": "RL tuning"}
_LAYOUT_SIZES = ("pp", "replicate", "fsdp", "cp", "tp", "ep", "vpp")
LONGEST_SHOWN_SECONDS = 100 * 365 * 86400


def verdict(plan: Plan) -> str:
    """Return the result in one or two sentences: model, cluster, run time, cost, and whether it fits."""
    kind = _KIND_NAMES.get(plan.kind, plan.kind.capitalize())
    work = f"{kind} {model_name(plan)} on {formatting.count(plan.tokens)} tokens"
    where = f"on {cluster_name(plan)}"
    price = f" and costs {formatting.dollars(plan.cost.cost_dollars)}" if plan.cost else ""
    if plan.fits:
        return f"{work} fits {where}, takes {formatting.duration(plan.run_seconds)}{price}."
    needed, limit = formatting.memory(plan.memory_bytes), formatting.memory(plan.memory_limit_bytes)
    unit, has = memory_unit(plan)
    return (
        f"{work} does not fit {where}: it needs {needed} per {unit}, but {has} {limit}. "
        "The times below assume that it fits."
    )


def model_name(plan: Plan) -> str:
    active = f", {formatting.count(plan.model.active_parameters)} active" if plan.model.is_moe else ""
    return f"{plan.model.name} ({formatting.count(plan.model.parameters)} parameters{active})"


def cluster_name(plan: Plan) -> str:
    cluster = plan.cluster
    cards = f"{cluster.num_gpus // cluster.instance.nodes_per_gpu:,} {cluster.instance.gpu.name}"
    nodes = f"{cluster.instance.name} x {cluster.num_nodes}"
    return f"{cluster.name} ({cards})" if cluster.name == nodes else f"{cluster.name} ({nodes}, {cards})"


def sharing_text(cluster: Cluster) -> str:
    """Return how ranks share GPUs; "" if each has its own."""
    sharers, gpu = cluster.instance.nodes_per_gpu, cluster.instance.gpu
    if sharers == 1:
        return ""
    return (
        f"{cluster.num_gpus} ranks share {cluster.num_gpus // sharers} x {gpu.name}: 1/{sharers} of its compute, "
        f"{formatting.memory(gpu.memory_bytes)} each; communication is a socket on loopback"
    )


def batch_text(plan: Plan) -> str:
    if plan.rollout is not None:
        return f"{formatting.count(plan.steps)} steps of {step_size_text(plan)}"
    tokens = formatting.count(plan.global_batch_sequences * plan.sequence)
    return f"{formatting.count(plan.steps)} steps of {tokens} tokens"


def step_size_text(plan: Plan) -> str:
    """Return what a step trains on."""
    if plan.rollout is None:
        return f"{plan.global_batch_sequences:,} sequences of {plan.sequence:,} tokens"
    return f"{plan.rollout.prompts:,} prompts x {plan.rollout.group:,} samples"


def rollout_text(plan: Plan) -> str:
    """Return how the samples of a step are generated; "" without rollouts."""
    rollout = plan.rollout
    if rollout is None:
        return ""
    engines = formatting.counted(rollout.engines, "engine")
    return (
        f"{step_size_text(plan)} of {formatting.count(round(rollout.completion_tokens))} tokens in "
        f"{formatting.duration(rollout.seconds)}: {formatting.rate(rollout.tokens_per_second, 'tokens')} on {engines}, "
        f"{rollout.running:,} samples each at once; mode {rollout.mode}"
    )


def end_days(plan: Plan, start: date) -> tuple[date, date, date] | None:
    """Return the end date of a run started on `start`, and those of the interval; None for runs of hours or
    centuries."""
    if plan.run_seconds < 2 * 86400 or plan.run_seconds_high > LONGEST_SHOWN_SECONDS:
        return None
    best, low, high = (
        start + timedelta(days=round(seconds / 86400))
        for seconds in (plan.run_seconds, plan.run_seconds_low, plan.run_seconds_high)
    )
    return best, low, high


def price_text(plan: Plan) -> str:
    if plan.cost is None:
        return f"no price known for {plan.cluster.instance.name}; put yours in the cluster file"
    age = f" ({plan.cost.price_age_days} days old)" if plan.cost.price_age_days > STALE_PRICE_DAYS else ""
    hourly = f"{formatting.dollars(plan.cost.dollars_per_hour_per_instance)}/h per instance"
    if plan.cost.num_instances > billed_instances(plan.cluster.instance, plan.cluster.num_nodes):
        hourly += f" ({plan.cost.num_instances} with the spares)"
    per_trillion = formatting.dollars(plan.cost.dollars_per_trillion_tokens)
    return (
        f"{plan.cost.purchase}, {hourly}, price of {plan.cost.price_date}{age}; "
        f"{formatting.dollars(plan.cost.dollars_per_day)} a day, {per_trillion} per 1T tokens"
    )


def failure_text(plan: Plan) -> str:
    goodput = plan.goodput
    if goodput.failures_per_day <= 0:
        return "no failures expected"
    every = formatting.duration(goodput.mean_hours_between_failures * 3600)
    saved = formatting.setting(goodput.interval_seconds)
    return f"fails every {every}, recovers from {goodput.method}, saved every {saved}"


def calibration_text(plan: Plan) -> str:
    if plan.calibrated:
        return f"{plan.profile}, calibrated"
    return f"{plan.profile}, uncalibrated: wide interval; `craton calibrate` with 3 or more logged runs narrows it"


def bottleneck_text(plan: Plan) -> str:
    limit = plan.bottleneck
    share = f", {formatting.percent(limit.share)} of the step ({limit.phase})" if limit.share > 0 else ""
    layer = "ML software" if limit.layer == "ml software" else limit.layer
    return f"{layer}: {limit.part}{share}"


def step_text(plan: Plan) -> str:
    """Return the share of each phase in the step, and the communication hidden behind compute."""
    largest = sorted(plan.phases, key=lambda phase: -plan.phases.get(phase, 0.0))
    shares = [
        f"{'exposed ' if phase == 'communication' else ''}{phase} {formatting.percent(_share(plan, phase))}"
        for phase in largest[:2]
        if _share(plan, phase) >= 0.0005
    ]
    hidden = plan.hidden_communication_seconds
    behind = f"; {formatting.duration(hidden)} of communication hidden behind compute" if hidden > 0 else ""
    return f"{', '.join(shares)}{behind}"


def memory_text(plan: Plan) -> str:
    needed, limit = formatting.memory(plan.memory_bytes), formatting.memory(plan.memory_limit_bytes)
    used = f"{needed} of the {limit} {memory_unit(plan)[1]}"
    difference = plan.memory_limit_bytes - plan.memory_bytes
    worst = max(plan.memory_instants, key=lambda name: plan.memory_instants[name], default="")
    peak = f"; peak: {worst}" if worst else ""
    return f"{used}, {formatting.memory(abs(difference))} {'free' if plan.fits else 'too much'}{peak}"


def storage_text(plan: Plan) -> str:
    storage = plan.storage
    limit = formatting.bandwidth(storage.data_limit_bytes_per_second)
    return (
        f"checkpoint {formatting.stored(storage.checkpoint_bytes)}; "
        f"data {formatting.bandwidth(storage.data_bytes_per_second)} of {limit} from {storage.data_tier}"
    )


def goodput_text(plan: Plan) -> str:
    goodput = plan.goodput
    text = (
        f"Saving every {formatting.setting(goodput.interval_seconds)} and recovering from {goodput.method} "
        f"keeps {formatting.percent(goodput.goodput)} of the time productive"
    )
    best_seconds, best = max(goodput.curve, key=lambda point: point[1])
    at_chosen = min(goodput.curve, key=lambda point: abs(point[0] - goodput.interval_seconds))[1]
    if best - at_chosen < 0.001:
        return f"{text}; no other interval gains more than 0.1 points"
    return f"{text}; about every {formatting.setting(best_seconds)} would gain {100 * (best - at_chosen):.1f} points"


def scaling_text(plan: Plan) -> str:
    first, last = scaling_points(plan)[0], scaling_points(plan)[-1]
    efficiency = formatting.percent(scaling_efficiencies(plan)[-1])
    more, faster = last.num_gpus / first.num_gpus, last.tokens_per_second / first.tokens_per_second
    return f"{more:.3g} x the GPUs give {faster:.1f} x the tokens/s: {efficiency} of ideal at {last.num_gpus:,} GPUs"


def scaling_points(plan: Plan) -> list[ScalingPoint]:
    return sorted(plan.scaling, key=lambda point: point.num_gpus)


def scaling_efficiencies(plan: Plan) -> list[float]:
    """Return tokens/s per GPU relative to the smallest number of GPUs."""
    points = scaling_points(plan)
    ideal = points[0].tokens_per_second / points[0].num_gpus
    return [point.tokens_per_second / point.num_gpus / ideal for point in points]


def sensitivity_text(plan: Plan) -> str:
    most = max(plan.sensitivities, key=lambda item: abs(item.effect))
    change = f"{most.name} {most.change}".strip()
    return f"The step is most sensitive to {change}: {formatting.signed_percent(most.effect)}"


def front_text(plan: Plan) -> str:
    priced = [item for item, _ in candidates(plan) if item.cost_dollars is not None and item.fits]
    fastest = min(priced, key=lambda entry: entry.run_seconds)
    cheapest = min(priced, key=lambda element: element.cost_dollars or 0.0)
    if fastest == cheapest:
        return f"{fastest.cluster} is both the fastest and the cheapest"
    return (
        f"{fastest.cluster} is fastest ({formatting.duration(fastest.run_seconds)}, "
        f"{formatting.dollars(fastest.cost_dollars or 0.0)}), {cheapest.cluster} cheapest "
        f"({formatting.duration(cheapest.run_seconds)}, {formatting.dollars(cheapest.cost_dollars or 0.0)})"
    )


def runner_up_text(runner_up: Alternative) -> str:
    cost = "no price" if runner_up.cost_dollars is None else formatting.dollars(runner_up.cost_dollars)
    step, run = formatting.duration(runner_up.step_seconds), formatting.duration(runner_up.run_seconds)
    return f"step {step}, run {run}, {cost}; {runner_up.reason} ({runner_up.layout})"


def shown_parts(plan: Plan, phase: str) -> list[tuple[str, float]]:
    """Return the parts of a phase, largest first, with the small ones summed up; they add up to the phase."""
    parts = sorted(plan.parts.get(phase, {}).items(), key=lambda part: -part[1])
    shown = [(name, seconds) for name, seconds in parts if seconds >= _SMALLEST_PART * plan.step_seconds]
    small = [(name, seconds) for name, seconds in parts if 0 < seconds < _SMALLEST_PART * plan.step_seconds]
    if len(small) == 1:
        return shown + small
    return [*shown, (f"{len(small)} smaller parts", sum(seconds for _, seconds in small))] if small else shown


def layout_change(chosen: Layout, other: Layout) -> str:
    """Return what another layout changes, in the print order of layouts; the whole layout if nothing is shared."""
    words = [
        f"{name} {getattr(other, name)}" for name in _LAYOUT_SIZES if getattr(other, name) != getattr(chosen, name)
    ]
    if other.fsdp > 1 and other.zero != chosen.zero:
        words.append(f"zero {other.zero}")
    if other.pp > 1 and other.schedule != chosen.schedule:
        words.append(other.schedule)
    if other.micro_batch != chosen.micro_batch:
        words.append(f"micro_batch {other.micro_batch}")
    if other.recompute != chosen.recompute:
        words.append(f"recompute {other.recompute}")
    if other.precision != chosen.precision:
        words.append(other.precision)
    if other.offload != chosen.offload:
        words.append(f"offload {other.offload}")
    return " · ".join(words) or "the same layout"


def candidates(plan: Plan) -> list[tuple[Alternative, bool]]:
    """Return the clusters of the search, fastest first, each with whether it is the chosen one."""
    nodes = f"{plan.cluster.instance.name} x {plan.cluster.num_nodes}"
    marked = [(item, item.cluster in (plan.cluster.name, nodes) and item.layout == plan.layout) for item in plan.front]
    if not any(chosen for _, chosen in marked):
        marked.append((_as_alternative(plan), True))
    return sorted(marked, key=lambda pair: pair[0].run_seconds)


def is_on_front(candidate: Alternative, others: list[Alternative]) -> bool:
    """Return whether the candidate is on the Pareto front of run time and cost among those that fit."""
    if candidate.cost_dollars is None or not candidate.fits:
        return False
    here = (candidate.run_seconds, candidate.cost_dollars)
    rivals = [
        (other.run_seconds, other.cost_dollars) for other in others if other.fits and other.cost_dollars is not None
    ]
    return not any(rival[0] <= here[0] and rival[1] <= here[1] and rival != here for rival in rivals)


def tier_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return every tier in plan order: the cost of a checkpoint there (every, write, blocks, read) and the recovery
    from it (best every, lost per failure, goodput, its interval)."""
    tiers = {tier.tier: tier for tier in plan.storage.tiers}
    recoveries = {recovery.method: recovery for recovery in plan.goodput.recoveries}
    return [
        (name, [*_tier_cells(tiers.get(name)), *_recovery_cells(recoveries.get(name))])
        for name in dict.fromkeys([*tiers, *recoveries])
    ]


def _tier_cells(tier: TierPlan | None) -> list[str]:
    if tier is None:
        return ["–"] * 4
    every = formatting.setting(tier.every_seconds) if tier.every_seconds else "–"
    return [every, *map(formatting.duration, (tier.write_seconds, tier.blocked_seconds, tier.read_seconds))]


def _recovery_cells(recovery: RecoveryPlan | None) -> list[str]:
    if recovery is None:
        return ["–"] * 4
    return [
        formatting.setting(recovery.interval_seconds),
        formatting.duration(recovery.detect_seconds + recovery.restart_seconds + recovery.redo_seconds),
        formatting.percent(recovery.goodput),
        formatting.percent_range(recovery.goodput_low, recovery.goodput_high),
    ]


def _as_alternative(plan: Plan) -> Alternative:
    return Alternative(
        cluster=plan.cluster.name,
        layout=plan.layout,
        step_seconds=plan.step_seconds,
        memory_bytes=plan.memory_bytes,
        run_seconds=plan.run_seconds,
        cost_dollars=plan.cost.cost_dollars if plan.cost else None,
        reason="chosen",
        fits=plan.fits,
        goodput=plan.goodput.goodput,
    )


def memory_unit(plan: Plan) -> tuple[str, str]:
    """Return what the memory of the plan is of, `GPU` or `rank`, and how much of it there is: `the GPU reports`."""
    if plan.cluster.instance.gpu.generation == "cpu":
        return "rank", "its part of the machine has"
    shared = plan.cluster.instance.nodes_per_gpu > 1
    return ("rank", "its part of a GPU has") if shared else ("GPU", "the GPU reports")


def _share(plan: Plan, phase: str) -> float:
    return plan.phases.get(phase, 0.0) / plan.step_seconds


def effect_text(sensitivity: Sensitivity) -> str:
    """Format the effect: an uncertainty acts in both directions, a change in one."""
    text = formatting.signed_percent(sensitivity.effect)
    return f"±{text.lstrip('+−')}" if sensitivity.change.startswith("±") else text
