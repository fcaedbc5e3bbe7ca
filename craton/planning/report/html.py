"""A plan as one self-contained HTML file: no network, no server, no fonts.

Every text of the plan is escaped; every plot has its numbers in a table beside it, so the page is complete without
JavaScript.
"""

from __future__ import annotations

import math
from datetime import date
from html import escape
from importlib.resources import files

from craton import formatting, html_report
from craton.html_report import Figure, Markup
from craton.planning.report import findings, plots
from craton.planning.result import INTERVAL_LEVEL, Plan
from craton.telemetry import step_phases


def plan_html(plan: Plan, start: date | None = None) -> str:
    """Return the page; with `start`, it also shows the end dates of the run."""
    figures: dict[str, Figure] = {}
    body = (
        _header(plan)
        + _tiles(plan, start)
        + _bottleneck(plan)
        + html_report.warning_list("Warnings", plan.warnings)
        + _step_section(plan, figures)
        + _memory_section(plan, figures)
        + _alternatives_section(plan)
        + _front_section(plan, figures)
        + _scaling_section(plan, figures)
        + _goodput_section(plan, figures)
        + _sensitivity_section(plan, figures)
        + _basis_section(plan)
    )
    footer = f"""Intervals should contain {formatting.percent(INTERVAL_LEVEL)} of measurements. As JSON:
<code>craton plan JOB --json</code>."""
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return html_report.page_html(f"{plan.job}: plan", Markup(body), figures, Markup(footer), style)


def _header(plan: Plan) -> Markup:
    badge = '<span class="badge fits">fits</span>' if plan.fits else '<span class="badge unfit">does not fit</span>'
    sharing = escape(findings.sharing_text(plan.cluster))
    shared = f'<p class="facts"><b>Sharing</b> {sharing}</p>\n' if sharing else ""
    return Markup(f"""<header>
<div class="eyebrow">Craton plan · {escape(plan.kind)} {badge}</div>
<h1>{escape(plan.job)}</h1>
<p class="verdict">{escape(findings.verdict(plan))}</p>
<p class="facts"><b>Layout</b> <code>{escape(str(plan.layout))}</code></p>
{shared}<p class="facts"><b>Profile</b> {html_report.with_code(findings.calibration_text(plan))}</p>
</header>
""")


def _tiles(plan: Plan, start: date | None) -> Markup:
    days = findings.end_days(plan, start) if start else None
    done = f"; done {formatting.day(days[0])} ({formatting.day_range(days[1], days[2])})" if days else ""
    begun = f" if started {formatting.day(start)}" if days and start else ""
    cost = plan.cost
    free = "free" if plan.fits else "too much"
    difference = formatting.memory(abs(plan.memory_limit_bytes - plan.memory_bytes))
    return html_report.tiles(
        [
            html_report.Tile(
                "Step",
                formatting.duration(plan.step_seconds),
                f"{findings.INTERVAL_NAME}; {findings.batch_text(plan)}",
                formatting.duration_range(plan.step_seconds_low, plan.step_seconds_high),
            ),
            html_report.Tile(
                "Run",
                formatting.duration(plan.run_seconds),
                f"failures included{done}{begun}",
                formatting.duration_range(plan.run_seconds_low, plan.run_seconds_high),
            ),
            html_report.Tile(
                "Cost",
                formatting.dollars(cost.cost_dollars) if cost else "not known",
                findings.price_text(plan),
                formatting.dollars_range(cost.cost_dollars_low, cost.cost_dollars_high) if cost else "",
            ),
            html_report.Tile(
                "Speed",
                f"{formatting.count(plan.tokens_per_second)} tokens/s",
                f"{formatting.count(plan.tokens_per_second / plan.cluster.num_gpus)} tokens/s per GPU",
                f"{formatting.percent(plan.mfu)} MFU",
            ),
            html_report.Tile(
                "Goodput",
                formatting.percent(plan.goodput.goodput),
                findings.failure_text(plan),
                formatting.percent_range(plan.goodput.goodput_low, plan.goodput.goodput_high),
            ),
            html_report.Tile(
                "Memory per GPU",
                formatting.memory(plan.memory_bytes),
                f"{difference} {free}",
                f"of {formatting.memory(plan.memory_limit_bytes)}",
            ),
        ]
    )


def _bottleneck(plan: Plan) -> Markup:
    limit = plan.bottleneck
    return Markup(
        f'<div class="callout"><h2>Bottleneck</h2><p><b>{escape(_sentence(findings.bottleneck_text(plan)))}</b></p>'
        f"<p>{escape(limit.text)} Relief: {escape(limit.relief)}</p></div>\n"
    )


def _step_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    figures["plot-step"] = plots.step_figure(plan)
    rows: list[tuple[str, list[str]]] = []
    for phase in step_phases(plan.phases):
        seconds = plan.phases.get(phase, 0.0)
        parts = findings.shown_parts(plan, phase)
        share = formatting.percent(seconds / plan.step_seconds)
        name = html_report.chip(plots.part_color(phase, 0), f"{phase}: {parts[0][0]}") if len(parts) == 1 else phase
        rows.append(("", [name, formatting.duration(seconds), share]))
        for index, (part, part_seconds) in enumerate(parts if len(parts) > 1 else ()):
            label = html_report.chip(plots.part_color(phase, index), part)
            share = formatting.percent(part_seconds / plan.step_seconds)
            rows.append(("part", [label, formatting.duration(part_seconds), share]))
    rows.append(("total", ["step", formatting.duration(plan.step_seconds), "100%"]))
    table = html_report.table(["phase", ">time", ">share"], rows)
    sentences = [
        _sentence(findings.step_text(plan)),
        *([f"Rollouts: {findings.rollout_text(plan)}."] if plan.rollout else []),
    ]
    return html_report.plot_section("Step", " ".join(sentences), "plot-step", table)


def _memory_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    figures["plot-memory"] = plots.memory_figure(plan)
    rows = [
        ("", [html_report.chip(plots.memory_color(index), name), formatting.gibibytes(size)])
        for index, (name, size) in enumerate(plots.memory_rows(plan))
    ]
    rows.append(("total", ["needed", formatting.gibibytes(plan.memory_bytes)]))
    rows.append(("", [findings.memory_unit(plan)[1], formatting.gibibytes(plan.memory_limit_bytes)]))
    table = html_report.table(["part", ">GiB"], rows)
    return html_report.plot_section("Memory", _sentence(findings.memory_text(plan)), "plot-memory", table)


def _alternatives_section(plan: Plan) -> Markup:
    other = Markup()
    if plan.runner_up is not None:
        cluster, text = escape(plan.runner_up.cluster), escape(findings.runner_up_text(plan.runner_up))
        other = Markup(f'<p class="facts other">On other hardware, <b>{cluster}</b>: {text}</p>')
    if not plan.alternatives:
        none = "No other layout was evaluated: the job fixes it, or nothing else is valid here."
        return html_report.absent_section("Alternatives", none, other)
    title = f"{plan.layouts_evaluated:,} layouts evaluated; the chosen one and what the others would change"
    chosen = [
        "chosen",
        formatting.duration(plan.step_seconds),
        formatting.memory(plan.memory_bytes),
        formatting.duration(plan.run_seconds),
        _dollars(plan.cost.cost_dollars if plan.cost else None),
        "",
    ]
    rows = [("chosen", chosen)] + [
        (
            "",
            [
                findings.layout_change(plan.layout, alternative.layout),
                formatting.duration(alternative.step_seconds),
                formatting.memory(alternative.memory_bytes),
                formatting.duration(alternative.run_seconds),
                _dollars(alternative.cost_dollars),
                alternative.reason,
            ],
        )
        for alternative in plan.alternatives
    ]
    table = html_report.table(["layout", ">step", ">memory", ">run", ">cost", "why not"], rows, wide=True)
    return html_report.section("Alternatives", title, Markup(table + other))


def _front_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    if not plan.front:
        return html_report.absent_section(
            "Cost against time", "No other clusters were searched: `--instances` and `--gpus` compare them."
        )
    rows = [
        (
            "chosen" if chosen else "",
            [
                f"{number} · {entry.cluster}",
                str(entry.layout),
                formatting.duration(entry.step_seconds),
                formatting.duration(entry.run_seconds),
                _dollars(entry.cost_dollars),
                formatting.percent(entry.goodput) if entry.goodput is not None else "–",
                entry.reason,
            ],
        )
        for number, (entry, chosen) in enumerate(findings.candidates(plan), 1)
    ]
    table = html_report.table(["=cluster", "layout", ">step", ">run", ">cost", ">goodput", "why"], rows, wide=True)
    if not any(item.cost_dollars is not None and item.fits for item, _ in findings.candidates(plan)):
        return html_report.absent_section("Cost against time", "No price is known for any of these clusters.", table)
    figures["plot-front"] = plots.front_figure(plan)
    return html_report.plot_section("Cost against time", findings.front_text(plan), "plot-front", below=table)


def _scaling_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    if len(plan.scaling) < 2:
        return html_report.absent_section("Scaling", "No other number of GPUs was evaluated.")
    figures["plot-scaling"] = plots.scaling_figure(plan)
    rows = [
        (
            "chosen" if point.num_gpus == plan.cluster.num_gpus else "",
            [
                f"{point.num_gpus:,}",
                formatting.count(point.tokens_per_second),
                formatting.percent(efficiency),
                formatting.duration(point.run_seconds),
                _dollars(point.cost_dollars),
            ],
        )
        for point, efficiency in zip(findings.scaling_points(plan), findings.scaling_efficiencies(plan), strict=True)
    ]
    table = html_report.table([">GPUs", ">tokens/s", ">efficiency", ">run", ">cost"], rows)
    return html_report.plot_section("Scaling", findings.scaling_text(plan), "plot-scaling", table)


def _goodput_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    rows = [
        ("chosen" if name == plan.goodput.method else "", [name, *cells]) for name, cells in findings.tier_rows(plan)
    ]
    columns = ["tier", ">saved every", ">write", ">blocks", ">read", ">best every", ">lost per failure", ">goodput"]
    tiers = html_report.table([*columns, f">{findings.INTERVAL_NAME}"], rows, wide=True) if rows else ""
    below = Markup(f'<p class="facts">{escape(_sentence(findings.storage_text(plan)))}.</p>{tiers}')
    if len(plan.goodput.curve) < 2 or not math.isfinite(plan.goodput.interval_seconds):
        return html_report.absent_section(
            "Checkpoints and recovery",
            "Without failures or checkpoint tiers there is no interval to choose.",
            below,
        )
    figures["plot-goodput"] = plots.goodput_figure(plan)
    return html_report.plot_section(
        "Checkpoints and recovery", findings.goodput_text(plan), "plot-goodput", below=below
    )


def _sensitivity_section(plan: Plan, figures: dict[str, Figure]) -> Markup:
    if not plan.sensitivities:
        return html_report.absent_section("Sensitivity", "No input was varied.")
    figures["plot-sensitivity"] = plots.sensitivity_figure(plan)
    largest = sorted(plan.sensitivities, key=lambda entry: -abs(entry.effect))
    rows = [("", [item.name, item.change or "–", findings.effect_text(item)]) for item in largest]
    table = html_report.table(["input", ">change", ">step time"], rows)
    return html_report.plot_section("Sensitivity", findings.sensitivity_text(plan), "plot-sensitivity", table)


def _basis_section(plan: Plan) -> Markup:
    """Return the inputs of the plan, for the reader to check."""
    model, instance = plan.model, plan.cluster.instance
    source = f" ({plan.cost.price_source})" if plan.cost and plan.cost.price_source else ""
    network = formatting.bandwidth(instance.network_bytes_per_second)
    facts = [
        ("model", findings.model_name(plan)),
        ("shape", f"{model.layers} layers, hidden {model.hidden:,}, {model.heads} heads, vocabulary {model.vocab:,}"),
        ("batch", findings.step_size_text(plan)),
        ("work", f"{formatting.count(plan.flops_per_token)} FLOPs per token"),
        ("cluster", findings.cluster_name(plan)),
        ("network", f"{network} per node, NVLink domain of {instance.nvlink_domain_gpus} GPUs"),
        ("failures", f"{1000 * plan.cluster.failures_per_node_day:.2g} per 1000 node-days"),
        ("profile", findings.calibration_text(plan)),
        ("price", findings.price_text(plan) + source),
    ]
    rows = [("", [name, html_report.with_code(text)]) for name, text in facts]
    return html_report.section("Basis", "The inputs of this plan", html_report.table(["=", ""], rows))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _dollars(amount: float | None) -> str:
    return "no price" if amount is None else formatting.dollars(amount)
