"""A plan as one HTML file that needs nothing else: no network, no server, no fonts.

A content security policy forbids the page to load or send anything; every text of the plan is escaped; every plot has
its numbers in a table beside it, so the page is whole without JavaScript too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import date
from html import escape
from importlib.resources import files

from craton.planning import findings, quantities, report_plots
from craton.planning.report_plots import Figure
from craton.planning.result import INTERVAL_LEVEL, PHASES, Plan

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Markup(str):
    """Text that is already HTML; every other string is escaped on its way into the page."""


def plan_html(plan: Plan, start: date | None = None) -> str:
    """The page; with `start`, it also says on which days the run would end."""
    from plotly.offline import get_plotlyjs  # large, and only the page needs it

    figures: dict[str, Figure] = {}
    body = Markup(
        _header(plan)
        + _tiles(plan, start)
        + _bottleneck(plan)
        + _warnings(plan)
        + _step_section(plan, figures)
        + _memory_section(plan, figures)
        + _alternatives_section(plan)
        + _front_section(plan, figures)
        + _scaling_section(plan, figures)
        + _goodput_section(plan, figures)
        + _sensitivity_section(plan, figures)
        + _basis_section(plan)
    )
    package = files("craton.planning")
    # "<" cannot end the script element when it is written as an escape of JSON.
    data = json.dumps(figures, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(plan.job)}: plan</title>
<style>{package.joinpath("report.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{body}
<footer>Intervals should hold {100 * INTERVAL_LEVEL:.0f} % of measurements. The same numbers as JSON:
<code>craton plan JOB --json</code>.</footer>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{package.joinpath("report.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _header(plan: Plan) -> str:
    badge = '<span class="badge fits">fits</span>' if plan.fits else '<span class="badge unfit">does not fit</span>'
    return f"""<header>
<div class="eyebrow">Craton plan · {escape(plan.kind)} {badge}</div>
<h1>{escape(plan.job)}</h1>
<p class="verdict">{escape(findings.verdict(plan))}</p>
<p class="facts"><b>Layout</b> <code>{escape(str(plan.layout))}</code></p>
<p class="facts"><b>Profile</b> {_with_code(findings.calibration_text(plan))}</p>
</header>
"""


def _tiles(plan: Plan, start: date | None) -> str:
    days = findings.end_days(plan, start) if start else None
    done = f"; done {quantities.day(days[0])} ({quantities.day_range(days[1], days[2])})" if days else ""
    begun = f" if started {quantities.day(start)}" if days and start else ""
    cost = plan.cost
    free = "free" if plan.fits else "too much"
    difference = quantities.memory(abs(plan.memory_limit_bytes - plan.memory_bytes))
    tiles = [
        (
            "Step",
            quantities.duration(plan.step_seconds),
            quantities.duration_range(plan.step_seconds_low, plan.step_seconds_high),
            f"{findings.INTERVAL_NAME}; {findings.batch_text(plan)}",
        ),
        (
            "Run",
            quantities.duration(plan.run_seconds),
            quantities.duration_range(plan.run_seconds_low, plan.run_seconds_high),
            f"failures included{done}{begun}",
        ),
        (
            "Cost",
            quantities.dollars(cost.cost_dollars) if cost else "not known",
            quantities.dollars_range(cost.cost_dollars_low, cost.cost_dollars_high) if cost else "",
            findings.price_text(plan),
        ),
        (
            "Speed",
            f"{quantities.count(plan.tokens_per_second)} tokens/s",
            f"{quantities.percent(plan.mfu)} MFU",
            f"{quantities.count(plan.tokens_per_second / plan.cluster.num_gpus)} tokens/s per GPU",
        ),
        (
            "Goodput",
            quantities.percent(plan.goodput.goodput),
            quantities.percent_range(plan.goodput.goodput_low, plan.goodput.goodput_high),
            findings.failure_text(plan),
        ),
        (
            "Memory of a GPU",
            quantities.memory(plan.memory_bytes),
            f"of {quantities.memory(plan.memory_limit_bytes)}",
            f"{difference} {free}",
        ),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><div class="title">{escape(name)}</div><div class="value">{escape(value)}</div>'
            f'<div class="range">{escape(interval)}</div><div class="note">{escape(note)}</div></div>'
            for name, value, interval, note in tiles
        )
        + "</div>\n"
    )


def _bottleneck(plan: Plan) -> str:
    limit = plan.bottleneck
    return (
        f'<div class="callout"><h2>Bottleneck</h2><p><b>{escape(_sentence(findings.bottleneck_text(plan)))}</b></p>'
        f"<p>{escape(limit.text)} Relief: {escape(limit.relief)}</p></div>\n"
    )


def _warnings(plan: Plan) -> str:
    if not plan.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in plan.warnings)
    return f'<div class="callout warning"><h2>Warnings</h2><ul>{items}</ul></div>\n'


def _step_section(plan: Plan, figures: dict[str, Figure]) -> str:
    figures["plot-step"] = report_plots.step_figure(plan)
    rows: list[tuple[str, list[str]]] = []
    for phase in PHASES:
        seconds = plan.phases.get(phase, 0.0)
        parts = findings.shown_parts(plan, phase)
        share = quantities.percent(seconds / plan.step_seconds)
        chip = _chip(report_plots.part_color(phase, 0)) if len(parts) == 1 else ""
        only = f": {parts[0][0]}" if len(parts) == 1 else ""
        rows.append(("", [Markup(chip + escape(phase + only)), quantities.duration(seconds), share]))
        for index, (name, part_seconds) in enumerate(parts if len(parts) > 1 else ()):
            label = Markup(_chip(report_plots.part_color(phase, index)) + escape(name))
            share = quantities.percent(part_seconds / plan.step_seconds)
            rows.append(("part", [label, quantities.duration(part_seconds), share]))
    rows.append(("total", ["step", quantities.duration(plan.step_seconds), "100 %"]))
    table = _table(["phase", ">time", ">share"], rows)
    return _section("Step", _sentence(findings.step_text(plan)), "plot-step", table)


def _memory_section(plan: Plan, figures: dict[str, Figure]) -> str:
    figures["plot-memory"] = report_plots.memory_figure(plan)
    rows = [
        ("", [Markup(_chip(report_plots.memory_color(index)) + escape(name)), quantities.gibibytes(size)])
        for index, (name, size) in enumerate(report_plots.memory_rows(plan))
    ]
    rows.append(("total", ["needed", quantities.gibibytes(plan.memory_bytes)]))
    rows.append(("", ["card reports", quantities.gibibytes(plan.memory_limit_bytes)]))
    table = _table(["part", ">GiB"], rows)
    return _section("Memory", _sentence(findings.memory_text(plan)), "plot-memory", table)


def _alternatives_section(plan: Plan) -> str:
    other = ""
    if plan.runner_up is not None:
        cluster, text = escape(plan.runner_up.cluster), escape(findings.runner_up_text(plan.runner_up))
        other = f'<p class="facts other">On other hardware, <b>{cluster}</b>: {text}</p>'
    if not plan.alternatives:
        none = "No other layout was evaluated: the job fixes it, or nothing else is valid here."
        return _absent("Alternatives", none, other)
    title = f"{plan.layouts_evaluated:,} layouts evaluated; the chosen one and what the others would change"
    chosen = [
        Markup("chosen"),
        quantities.duration(plan.step_seconds),
        quantities.memory(plan.memory_bytes),
        quantities.duration(plan.run_seconds),
        _dollars(plan.cost.cost_dollars if plan.cost else None),
        "",
    ]
    rows = [("chosen", chosen)] + [
        (
            "",
            [
                findings.layout_change(plan.layout, each.layout),
                quantities.duration(each.step_seconds),
                quantities.memory(each.memory_bytes),
                quantities.duration(each.run_seconds),
                _dollars(each.cost_dollars),
                each.reason,
            ],
        )
        for each in plan.alternatives
    ]
    table = _table(["layout", ">step", ">memory", ">run", ">cost", "why not"], rows, wide=True)
    return f"<section><h2>Alternatives</h2><h3>{escape(title)}</h3>{table}{other}</section>\n"


def _front_section(plan: Plan, figures: dict[str, Figure]) -> str:
    if not plan.front:
        return _absent("Cost against time", "No other clusters were searched: `--instances` and `--gpus` compare them.")
    rows = [
        (
            "chosen" if chosen else "",
            [
                f"{number} · {each.cluster}",
                str(each.layout),
                quantities.duration(each.step_seconds),
                quantities.duration(each.run_seconds),
                _dollars(each.cost_dollars),
                quantities.percent(each.goodput) if each.goodput is not None else "–",
                each.reason,
            ],
        )
        for number, (each, chosen) in enumerate(findings.candidates(plan), 1)
    ]
    table = _table(["=cluster", "layout", ">step", ">run", ">cost", ">goodput", "why"], rows, wide=True)
    if not any(each.cost_dollars is not None and each.fits for each, _ in findings.candidates(plan)):
        return _absent("Cost against time", "No price is known for any of these clusters.", table)
    figures["plot-front"] = report_plots.front_figure(plan)
    return _section("Cost against time", findings.front_text(plan), "plot-front", "", table)


def _scaling_section(plan: Plan, figures: dict[str, Figure]) -> str:
    if len(plan.scaling) < 2:
        return _absent("Scaling", "No other number of GPUs was evaluated.")
    figures["plot-scaling"] = report_plots.scaling_figure(plan)
    rows = [
        (
            "chosen" if point.num_gpus == plan.cluster.num_gpus else "",
            [
                f"{point.num_gpus:,}",
                quantities.count(point.tokens_per_second),
                quantities.percent(efficiency),
                quantities.duration(point.run_seconds),
                _dollars(point.cost_dollars),
            ],
        )
        for point, efficiency in zip(findings.scaling_points(plan), findings.scaling_efficiencies(plan), strict=True)
    ]
    table = _table([">GPUs", ">tokens/s", ">efficiency", ">run", ">cost"], rows)
    return _section("Scaling", findings.scaling_text(plan), "plot-scaling", table)


def _goodput_section(plan: Plan, figures: dict[str, Figure]) -> str:
    rows = [
        ("chosen" if name == plan.goodput.method else "", [name, *cells]) for name, cells in findings.tier_rows(plan)
    ]
    columns = ["tier", ">saved every", ">write", ">blocks", ">read", ">best every", ">lost per failure", ">goodput"]
    tiers = _table([*columns, f">{findings.INTERVAL_NAME}"], rows, wide=True) if rows else ""
    facts = f'<p class="facts">{escape(_sentence(findings.storage_text(plan)))}.</p>'
    if len(plan.goodput.curve) < 2 or not math.isfinite(plan.goodput.interval_seconds):
        return _absent(
            "Checkpoints and recovery",
            "Without failures or checkpoint tiers there is no interval to choose.",
            facts + tiers,
        )
    figures["plot-goodput"] = report_plots.goodput_figure(plan)
    return _section("Checkpoints and recovery", findings.goodput_text(plan), "plot-goodput", "", facts + tiers)


def _sensitivity_section(plan: Plan, figures: dict[str, Figure]) -> str:
    if not plan.sensitivities:
        return _absent("Sensitivity", "Nothing was varied.")
    figures["plot-sensitivity"] = report_plots.sensitivity_figure(plan)
    largest = sorted(plan.sensitivities, key=lambda each: -abs(each.effect))
    rows = [("", [each.name, each.change or "–", findings.effect_text(each)]) for each in largest]
    table = _table(["input", ">change", ">step time"], rows)
    return _section("Sensitivity", findings.sensitivity_text(plan), "plot-sensitivity", table)


def _basis_section(plan: Plan) -> str:
    """What was fed in, so that a reader can check it."""
    model, instance = plan.model, plan.cluster.instance
    source = f" ({plan.cost.price_source})" if plan.cost and plan.cost.price_source else ""
    network = quantities.rate(instance.network_bytes_per_second)
    facts = [
        ("model", findings.model_name(plan)),
        ("shape", f"{model.layers} layers, hidden {model.hidden:,}, {model.heads} heads, vocabulary {model.vocab:,}"),
        ("batch", f"{plan.global_batch_sequences:,} sequences of {plan.sequence:,} tokens"),
        ("work", f"{quantities.count(plan.flops_per_token)} FLOPs a token"),
        ("cluster", findings.cluster_name(plan)),
        ("network", f"{network} a node, NVLink domain of {instance.nvlink_domain_gpus} GPUs"),
        ("failures", f"{1000 * plan.cluster.failures_per_node_day:.2g} per 1000 node-days"),
        ("profile", findings.calibration_text(plan)),
        ("price", findings.price_text(plan) + source),
    ]
    rows = [("", [name, Markup(_with_code(text))]) for name, text in facts]
    return f"<section><h2>Basis</h2><h3>What this was computed from</h3>{_table(['=', ''], rows)}</section>\n"


def _section(name: str, finding: str, plot: str, table: str, below: str = "") -> str:
    figure = f'<div class="plot" id="{plot}" role="img" aria-label="{escape(finding)}"></div>'
    body = f'<div class="pair">{figure}<div>{table}</div></div>' if table else figure
    return f"<section><h2>{escape(name)}</h2><h3>{escape(finding)}</h3>{body}{below}</section>\n"


def _absent(name: str, sentence: str, below: str = "") -> str:
    return f'<section><h2>{escape(name)}</h2><p class="absent">{_with_code(sentence)}</p>{below}</section>\n'


def _table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], wide: bool = False) -> str:
    """Rows with their class; a column is of numbers after ">", of unbroken names after "="; a wide table becomes
    cards on a phone."""
    names = [column.lstrip(">=") for column in columns]
    classes = [{">": "number", "=": "name"}.get(column[:1], "plain") for column in columns]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(classes, names, strict=True))
    lines = []
    for row_class, cells in rows:
        line = "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{_html(cell)}</td>'
            for kind, name, cell in zip(classes, names, cells, strict=True)
        )
        lines.append(f'<tr class="{row_class}">{line}</tr>')
    thead = f"<thead><tr>{head}</tr></thead>" if any(names) else ""
    return f'<table class="{"wide" if wide else ""}">{thead}<tbody>{"".join(lines)}</tbody></table>'


def _html(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape(cell)


def _chip(token: str) -> str:
    name, _, share = token.removeprefix("@").partition("/")
    color = f"color-mix(in srgb, var(--{name}) {share or 100}%, var(--surface))"
    return f'<span class="chip" style="background:{color}"></span>'


def _with_code(text: str) -> str:
    """Escaped text in which `commands` stand in the font of code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _dollars(amount: float | None) -> str:
    return "no price" if amount is None else quantities.dollars(amount)
