"""Chart data of the page: measured curves with their plan, and their newest values as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton import formatting
from craton.observability.web.readers import Curves
from craton.observability.web.sources import LATENCIES
from craton.telemetry import split_label

Chart = dict[str, Any]
OWN = "own "  # prefix of the names of charts of custom metrics
LOOKS: dict[str, Chart] = {
    "first": {},
    "second": {"color": "warm"},
    "third": {"color": "phase-optimizer"},
    "labels": {},
    "validation": {"color": "warm", "points": True},
    "interval": {"color": "muted", "points": True},
}
SUITE = "run_evaluation_accuracy"
LABEL_COLORS = ("accent", "warm", *(f"phase-{name}" for name in ("optimizer", "checkpoint", "reward", "data")))
# Of post-training: name → title, unit, and for each line its name, its metric and how it looks; with look `labels`, a
# line for each label of the metric.
RESULT_CHARTS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "reward": (
        "Reward",
        "score",
        (("mean", "reward", "first"), ("validation", "validation_reward", "validation")),
    ),
    "accuracy": (
        "Accuracy on the pairs",
        "share",
        (("training", "reward_accuracy", "first"), ("validation", "validation_reward_accuracy", "validation")),
    ),
    "margin": (
        "Reward margin",
        "score",
        (("training", "reward_margin", "first"), ("validation", "validation_reward_margin", "validation")),
    ),
    "pair": (
        "Reward of the answers",
        "score",
        (("chosen", "chosen_reward", "first"), ("rejected", "rejected_reward", "second")),
    ),
    "length": (
        "Generated tokens per sample",
        "",
        (("mean", "completion_tokens", "first"), ("longest", "longest_completion_tokens", "second")),
    ),
    "kl": ("KL divergence from the reference", "", (("KL", "kl", "first"),)),
    "entropy": ("Entropy of the policy", "score", (("entropy", "entropy", "first"),)),
    "staleness": ("Staleness of the samples, in steps", "score", (("mean", "staleness", "first"),)),
    "rollouts": ("Rollout tokens per second", "tokens/s", (("generated", "rollout_tokens_per_second", "first"),)),
    "idle": (
        "Idle share of the step",
        "share",
        (("trainer", "trainer_idle_share", "first"), ("rollouts", "rollout_idle_share", "second")),
    ),
    "mismatch": (
        "Rollout against trainer",
        "",
        (("|Δ log p|", "logprob_gap", "first"), ("k3", "logprob_k3", "second")),
    ),
    "clipped": (
        "Clipped and corrected tokens",
        "share",
        (("clipped", "clipped_share", "first"), ("corrected", "corrected_share", "second")),
    ),
    "samples": (
        "Samples without signal",
        "share",
        (
            ("truncated", "truncated_share", "first"),
            ("no verdict", "verifier_failure_share", "second"),
            ("advantage 0", "advantage_zero_share", "third"),
        ),
    ),
    "terms": ("Reward by term", "score", (("", "term_reward", "labels"),)),
    "failures": ("Terms without a value", "share", (("", "term_failure_share", "labels"),)),
    "value": ("Loss of the value head", "", (("value loss", "value_loss", "first"),)),
}
WRITERS = {
    "score": formatting.score,
    "seconds": formatting.duration,
    "share": formatting.percent,
    "tokens/s": formatting.amount,
    "": formatting.amount,
}


def training_charts(curves: Curves, plan: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts with data: loss, throughput, step time and gradient norm over steps, those of post-training,
    and custom metrics."""
    charts: dict[str, Chart] = {}

    def series(name: str, key: str, **more: Any) -> list[Chart]:
        return [{"name": name, "values": curves.values[key], "color": "accent", **more}] if key in curves.values else []

    def by_label(metric: str) -> list[Chart]:
        split = [(key, label[1]) for key in curves.values if (label := split_label(key)) and label[0] == metric]
        return [
            line
            for number, (key, label) in enumerate(split)
            for line in series(label, key, color=LABEL_COLORS[number % len(LABEL_COLORS)])
        ]

    def add(chart: str, lines: list[Chart], **more: Any) -> None:
        if lines:
            charts[chart] = {"x": curves.steps, "series": lines, "unit": "", **more}

    low, middle, high = (_number(plan.get(f"step_seconds{end}")) for end in ("_low", "", "_high"))
    rate = _number(plan.get("tokens_per_second"))
    evaluations = series("evaluation", "run_evaluation_loss", color="warm", points=True)
    add("loss", series("loss", "run_loss") + evaluations)
    # Throughput is the inverse of the step time, so its interval has the inverse bounds.
    band = [rate * middle / high, rate * middle / low] if rate and low and middle and high else None
    add("speed", series("measured", "run_tokens_per_second"), plan=rate, band=band, unit="tokens/s")
    band = [low, high] if low and high else None
    add("step", series("measured", "run_step_seconds"), plan=middle, band=band, unit="seconds")
    add("gradient", series("gradient norm", "run_gradient_norm"))
    ends = [
        line
        for end in ("low", "high")
        for line in series(f"95% interval, {end}", f"{SUITE}_{end}", **LOOKS["interval"])
    ]
    add("suite", series("accuracy", SUITE, **LOOKS["validation"]) + ends, unit="share", low=0)
    for chart, (_, unit, lines) in RESULT_CHARTS.items():
        drawn = [line for name, key, look in lines for line in series(name, f"run_{key}", **LOOKS[look])]
        drawn += [line for _, key, look in lines if look == "labels" for line in by_label(f"run_{key}")]
        labels = {"has_labels": True} if any(look == "labels" for _, _, look in lines) else {}
        add(chart, drawn, unit=unit, **({"low": 0} if unit == "share" else {}), **labels)
    for name, (steps, values) in curves.own.items():
        line = {"name": name, "values": values, "color": "accent"}
        charts[f"{OWN}{name}"] = {"x": steps, "series": [line], "unit": "", "title": name}
    return with_newest(charts)


def suite_rows(curves: Curves) -> list[dict[str, Any]]:
    """Return a row of numbers for each evaluation of a suite in a training, the newest first."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "problems", "tokens", "seconds", "failure_share")
    columns = {name: curves.values.get(f"run_evaluation_{name}", [None] * len(curves.steps)) for name in names}
    rows = [
        {"step": step, **{name: column[index] for name, column in columns.items()}}
        for index, step in enumerate(curves.steps)
    ]
    return [row for row in reversed(rows) if row["accuracy"] is not None and row["problems"] is not None]


def with_newest(charts: dict[str, Chart]) -> dict[str, Chart]:
    """Add to each chart the newest value of each line as text, readable without drawing. The first line of a chart has
    its title, unless the lines are those of labels."""
    for chart in charts.values():
        writer = WRITERS[chart["unit"]]
        texts: list[str] = []
        for line in chart["series"]:
            newest = next((value for value in reversed(line["values"]) if value is not None), None)
            if newest is not None:
                is_named = texts or chart.get("has_labels")
                texts.append(f"{line['name']} {writer(newest)}" if is_named else writer(newest))
        chart["newest"] = " · ".join(texts)
    return charts


def serving_charts(curves: Mapping[str, Any], end: str = "now") -> dict[str, Chart]:
    """Return charts of latencies, tokens, requests and KV cache over the seconds before `end`."""
    if not curves:
        return {}
    values, x = curves["values"], {"x": curves["seconds"], "x_unit": "seconds", "x_end": end}

    def series(name: str, key: str, color: str) -> dict[str, Any]:
        return {"name": name, "values": values[key], "color": color}

    charts: dict[str, Any] = {}
    for name in LATENCIES:
        lines = [series("median", f"{name}_median", "accent"), series("95%", f"{name}_p95", "warm")]
        charts[name] = {**x, "series": lines, "unit": "seconds"}
    charts["tokens"] = {**x, "series": [series("generated", "tokens_per_second", "accent")], "unit": "tokens/s"}
    requests = [series("running", "running", "accent"), series("waiting", "waiting", "warm")]
    charts["requests"] = {**x, "series": requests, "unit": ""}
    charts["kv"] = {**x, "series": [series("in use", "kv_share", "accent")], "unit": "share", "low": 0, "high": 1}
    return with_newest(charts)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
