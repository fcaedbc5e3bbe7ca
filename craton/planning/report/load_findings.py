"""Sentences about the plan of a load, for the terminal and the page."""

from __future__ import annotations

import math
from dataclasses import replace

from craton import formatting
from craton.planning.serving.search import Deployment, Interval, LoadPlan, SloMiss

LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
BASIS_NOTE = "prompts and arrivals follow the stated distributions; queues are closed forms"


def load_text(plan: LoadPlan) -> str:
    """`20 requests/s of 1,024 input and 256 output tokens, 40% of prompts cached`."""
    load = plan.load
    if load.concurrency is not None:
        who = formatting.counted(load.concurrency, "user")
        who += f" ({load.requests:,} requests)" if load.requests else ""
    else:
        who = f"{rate(asked_rate(plan))} requests/s"
    lengths = []
    for name, section in (("input", load.input), ("output", load.output)):
        if section.min is not None:
            text = f"{section.min:,} to {section.max:,}"
        else:
            text = f"{section.mean:,}" + (f" (p95 {section.p95:,})" if section.p95 else "")
        lengths.append(f"{text} {name}")
    text = f"{who} of {' and '.join(lengths)} tokens"
    if load.prefix_hits:
        text += f", {formatting.percent(load.prefix_hits)} of prompt tokens cached"
    kind = "bursty" if load.burstiness < 1.0 else "steady"
    return text + (f", {kind} (burstiness {load.burstiness:g})" if load.burstiness != 1.0 else "")


def asked_rate(plan: LoadPlan) -> float:
    """Return the rate of the load; without one, the rate that the chosen deployment serves."""
    return plan.load.rate if plan.load.rate is not None else plan.chosen.rate


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def deployment_text(row: Deployment) -> str:
    """`2 replicas of tp 2 on one p5.48xlarge`."""
    where = f"one {row.instance}" if row.nodes == 1 else f"{row.nodes:,} x {row.instance}"
    if row.prefill is not None:
        return f"{_replicas(row.prefill)} for prefill and {_replicas(row.layout)} for decode on {where}"
    return f"{_replicas(row.layout)} on {where}"


def short_text(row: Deployment) -> str:
    """`3 x tp 4`; with pools `3 x tp 2 → 1 x tp 4`, prefill first."""
    pools = [row.layout] if row.prefill is None else [row.prefill, row.layout]
    return " → ".join(f"{layout.replicas} x {replace(layout, replicas=1)}" for layout in pools)


def _replicas(layout: object) -> str:
    count = getattr(layout, "replicas", 1)
    text = str(layout).removesuffix(f"replicas {count}").removesuffix(" · ") or "tp 1"
    return f"{formatting.counted(count, 'replica')} of {text}"


def load_verdict(plan: LoadPlan) -> str:
    """Return what holds the load, or which limit nothing keeps and by how much."""
    row = plan.chosen
    where, is_one = deployment_text(row), row.prefill is None and row.layout.replicas == 1
    is_only = len(plan.deployments) == 1  # the job states it, or nothing else fits
    if row.is_saturated and is_only:
        return (
            f"{where[:1].upper()}{where[1:]} {'does' if is_one else 'do'} not hold {load_text(plan)}: "
            f"{'it saturates' if is_one else 'they saturate'} at {rate(row.max_rate.value)} requests/s "
            f"({limit_text(row)})."
        )
    if row.is_saturated:
        return (
            f"Nothing holds {load_text(plan)}: {where} {'saturates' if is_one else 'saturate'} at "
            f"{rate(row.max_rate.value)} requests/s ({limit_text(row)})."
        )
    if row.misses:
        miss = max(row.misses, key=lambda miss: miss.ratio)
        limit = f"{LATENCY_NAMES[miss.latency]} {miss.statistic} ≤ {formatting.setting(miss.limit)}"
        if is_only:
            return (
                f"{limit}: {where} {'misses' if is_one else 'miss'} it for {load_text(plan)}: "
                f"{formatting.duration(miss.value)}, {above_text(miss)}."
            )
        return (
            f"{limit}: no layout keeps it for "
            f"{load_text(plan)}. Nearest: {where}, {formatting.duration(miss.value)}, {above_text(miss)}."
        )
    kept = ", ".join(
        f"{LATENCY_NAMES[name]} {statistic} {latency_text(getattr(row, name)[statistic])} ≤ {formatting.setting(limit)}"
        for name, limits in plan.slo.items()
        for statistic, limit in limits.items()
    )
    verb = "holds" if is_one else "hold"
    text = f"{where[:1].upper()}{where[1:]} {verb} {load_text(plan)}"
    text += (
        f": {kept}" if kept else f": TTFT p95 {latency_text(row.ttft['p95'])}, TPOT p95 {latency_text(row.tpot['p95'])}"
    )
    if row.dollars_per_million_output is not None:
        text += f"; {formatting.dollars(row.dollars_per_million_output.value)} per million output tokens"
    return text + "."


def above_text(miss: SloMiss) -> str:
    """`40% above`; from twice the limit on `3.2 times the limit`, and `without bound` where it grows so."""
    if not math.isfinite(miss.ratio):
        return "without bound"
    if miss.ratio < 2.0:
        return f"{formatting.percent(miss.ratio - 1.0)} above"
    return f"{rate(miss.ratio)} times the limit"


def latency_text(interval: Interval) -> str:
    if not math.isfinite(interval.value):
        return "grows without bound"
    return f"{formatting.duration(interval.value)} ({range_text(interval)})"


def range_text(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return "unbounded"
    if not math.isfinite(interval.high):
        return f"{formatting.duration(interval.low)} to unbounded"
    return formatting.duration_range(interval.low, interval.high)


def limit_text(row: Deployment) -> str:
    """Return what saturates it, and the remedy."""
    remedies = {
        "prefill": "prompts take the GPUs' time: more replicas, prefix caching, or faster GPUs",
        "decode": "decode steps take the GPUs' time: more replicas, a lower precision, or faster GPUs",
        "KV cache": "the KV cache is full: more replicas, a wider layout, or kv_precision fp8",
        "max_running": "max_running is reached: raise it, or add replicas",
    }
    return remedies[row.limit]


def saturation_text(plan: LoadPlan) -> str:
    row = plan.chosen
    low, high = (rate(end) for end in row.max_rate[1:])
    share = asked_rate(plan) / row.max_rate.value if row.max_rate.value else math.inf
    if plan.load.concurrency is not None:
        return (
            f"these users send {rate(row.rate)} requests/s, {formatting.percent(share)} of the "
            f"{rate(row.max_rate.value)} ({low}–{high}) that saturate it; more users wait longer. Limit: "
            f"{limit_text(row)}"
        )
    return (
        f"at {rate(row.max_rate.value)} requests/s ({low}–{high}) queues grow without bound; this load is "
        f"{formatting.percent(share)} of it. Limit: {limit_text(row)}"
    )


def burst_text(plan: LoadPlan) -> str:
    """Return what a benchmark measures that begins with all users at once; empty where the plan is for one, or has a
    rate."""
    if plan.benchmark is None:
        return ""
    mean, tail = plan.benchmark.ttft["mean"], plan.benchmark.ttft["p95"]
    count = plan.benchmark.requests
    return (
        f"a benchmark begins with all users at once, which the latencies of this plan do not include. Over {count:,} "
        f"requests it has TTFT {formatting.duration(mean.value)} on average, p95 {latency_text(tail)}; --requests "
        f"{count} plans for it"
    )


def bottleneck_text(row: Deployment) -> str:
    parts = ", ".join(f"{name} {formatting.percent(share)}" for name, share in list(row.bottleneck.items())[:4])
    prefill = formatting.percent(row.prefill_share)
    if row.prefill is not None:
        return f"{parts} of a decode step; prefill has {prefill} of the GPUs"
    return f"{parts} of a step; prefill takes {prefill} of the time"


def drafts_text(plan: LoadPlan) -> str:
    """`llama-3.2-1b, 3 draft tokens per step (auto): decode 1.36x (1.10x to 2.01x) …`; empty without drafts."""
    drafts = plan.drafts
    if drafts is None:
        return ""
    acceptance = f"acceptance {formatting.percent(drafts.acceptance)}"
    published = ""
    if drafts.is_assumed:
        ends = (formatting.percent(end) for end in (drafts.acceptance_low, drafts.acceptance_high))
        acceptance += f" assumed ({' to '.join(ends)}), which is in all intervals"
        published = f" ({drafts.speedup_low:.2f}x to {drafts.speedup_high:.2f}x)"
    if not drafts.draft_tokens:
        return f"{drafts.model}: no draft tokens, they would cost more than they save at this load; {acceptance}"
    tokens = formatting.counted(drafts.draft_tokens, "draft token")
    auto = " (auto)" if drafts.is_auto else ""
    return (
        f"{drafts.model}, {tokens} per step{auto}: decode {drafts.speedup:.2f}x{published} at this load; {acceptance}"
    )


def precision_text(plan: LoadPlan) -> str:
    """`nvfp4 weights, bf16 in attention; fp8 activations; bf16 KV cache`."""
    attention = "" if plan.attention_precision == plan.precision else f", {plan.attention_precision} in attention"
    return f"{plan.precision} weights{attention}; {plan.activation_precision} activations; {plan.kv_precision} KV cache"


def throughput_text(row: Deployment) -> str:
    per_gpu, per_user = row.tokens_per_second_per_gpu, row.tokens_per_second_per_user
    total = formatting.count(round(row.tokens_per_second.value))
    return (
        f"{total} output tokens/s, {formatting.count(round(per_gpu.value))} per GPU; "
        f"{formatting.count(round(per_user.value))} tokens/s for each user "
        f"({formatting.count(round(per_user.low))}–{formatting.count(round(per_user.high))})"
    )


def kv_text(row: Deployment) -> str:
    room = formatting.counted(row.max_concurrency, "request")
    tokens = formatting.count(round(row.kv_tokens))
    return f"{tokens} tokens: {room} at once; {rate(row.decoding)} in decode on average"


def cost_text(plan: LoadPlan) -> str:
    row = plan.chosen
    if row.dollars_per_hour is None or row.dollars_per_million_input is None or row.dollars_per_million_output is None:
        return plan.price_text
    output, prompt = row.dollars_per_million_output, row.dollars_per_million_input
    return (
        f"{formatting.dollars(row.dollars_per_hour)} per hour for {formatting.counted(row.nodes, 'node')} "
        f"({formatting.counted(row.gpus, 'GPU')} in use); per million tokens {dollars_text(prompt)} input, "
        f"{dollars_text(output)} output, split by the time of prefill and decode; {plan.price_text}"
    )


def dollars_text(interval: Interval) -> str:
    """`$2.40 ($2.10–2.70)`; without the interval where the price is fixed."""
    text = formatting.small_dollars(interval.value)
    if interval.high - interval.low < 0.01 * interval.value:
        return text
    return f"{text} ({formatting.dollars_range(interval.low, interval.high)})"


def basis_text(plan: LoadPlan) -> str:
    percent = formatting.percent(plan.log_deviation)
    return f"{plan.basis}; step times ±{percent} (one standard deviation); {BASIS_NOTE}"


def tier_texts(plan: LoadPlan) -> list[str]:
    return [
        f"{tier.name}: {formatting.count(round(tier.tokens))} tokens a node; a prompt reloads in "
        f"{formatting.duration(tier.reload_seconds)}, prefill takes {formatting.duration(tier.recompute_seconds)}: "
        f"{'reload' if tier.is_faster else 'recompute'}"
        for tier in plan.tiers
    ]


def warnings(plan: LoadPlan) -> list[str]:
    row, found = plan.chosen, [*plan.warnings]
    if plan.load.concurrency is None and not row.is_saturated and row.max_rate.low < row.rate:
        found.append(
            "the interval includes saturation: at its slow end the server holds only "
            f"{rate(row.max_rate.low)} requests/s"
        )
    for name, limits in plan.slo.items():
        for statistic, limit in limits.items():
            interval = getattr(row, name)[statistic]
            if interval.value <= limit < interval.high:
                end = f"ends at {formatting.duration(interval.high)}" if math.isfinite(interval.high) else "has no end"
                found.append(f"{LATENCY_NAMES[name]} {statistic} may be above its limit: the interval {end}")
    return found
