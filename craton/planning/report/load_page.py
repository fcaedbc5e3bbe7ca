"""The plan of a load as one HTML file: throughput per GPU against per user, latency against load, and the limits."""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files

from craton import formatting, html_report
from craton.html_report import (
    Figure,
    Markup,
    axis_name,
    axis_title,
    label,
    log_axis,
    log_range,
    plain_layout,
    vertical_line,
)
from craton.planning.report import load_findings as findings
from craton.planning.report.load_table import deployment_columns, deployment_heading
from craton.planning.report.load_terminal import fields
from craton.planning.result import INTERVAL_LEVEL
from craton.planning.serving.search import FrontPoint, LoadPlan

FRONT_ROWS = 10  # of the table
PART_COLORS = {
    "matmul": "@compute",
    "experts": "@rollout",
    "attention": "@optimizer",
    "prefill attention": "@checkpoint",
    "head": "@data",
    "communication": "@communication",
    "overhead": "@memory-8",
}


def load_html(plan: LoadPlan) -> str:
    """Return the page."""
    figures: dict[str, Figure] = {}
    body = (
        _header(plan)
        + _tiles(plan)
        + html_report.warning_list("Warnings", findings.warnings(plan))
        + _latency_section(plan, figures)
        + _front_section(plan, figures)
        + _limits_section(plan)
        + _deployments_section(plan)
        + _basis_section(plan)
    )
    footer = f"""Intervals should contain {formatting.percent(INTERVAL_LEVEL)} of measurements. As JSON:
<code>craton plan JOB --json</code>."""
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return html_report.page_html(f"{plan.model}: serving plan", Markup(body), figures, Markup(footer), style)


def _header(plan: LoadPlan) -> Markup:
    badge = ("fits", "holds") if plan.holds else ("unfit", "does not hold")
    return Markup(f"""<header>
<div class="eyebrow">Craton plan · serving <span class="badge {badge[0]}">{badge[1]}</span></div>
<h1>{escape(plan.model)} on {escape(plan.engine)}</h1>
<p class="verdict">{escape(findings.load_verdict(plan))}</p>
<p class="facts"><b>Saturation</b> {escape(findings.saturation_text(plan))}</p>
</header>
""")


def _tiles(plan: LoadPlan) -> Markup:
    row = plan.chosen
    shown = []
    for name, title in findings.LATENCY_NAMES.items():
        latency = getattr(row, name)["p95"]
        value = formatting.duration(latency.value) if math.isfinite(latency.value) else "unbounded"
        limit = plan.slo.get(name, {}).get("p95")
        note = f"p95; limit {formatting.setting(limit)}" if limit else "p95"
        shown.append(html_report.Tile(title, value, note, findings.range_text(latency)))
    per_gpu = row.tokens_per_second_per_gpu
    shown.append(
        html_report.Tile(
            "Throughput",
            f"{formatting.count(round(per_gpu.value))} tokens/s",
            f"output, per GPU; {formatting.count(round(row.tokens_per_second_per_user.value))} per user",
            "",
        )
    )
    output = row.dollars_per_million_output
    shown.append(
        html_report.Tile(
            "Output cost",
            formatting.dollars(output.value) if output else "no price",
            "per million tokens" + (f"; {formatting.dollars(row.dollars_per_hour)}/h" if row.dollars_per_hour else ""),
            formatting.dollars_range(output.low, output.high) if output and output.low < output.high else "",
        )
    )
    shown.append(
        html_report.Tile(
            "GPUs", f"{row.gpus:,}", f"{row.gpu}, {formatting.counted(row.nodes, 'node')}", findings.short_text(row)
        )
    )
    return html_report.tiles(shown)


def _latency_section(plan: LoadPlan, figures: dict[str, Figure]) -> Markup:
    figures["plot-latency"] = _latency_figure(plan)
    rows = [
        (
            "",
            [
                findings.rate(point.rate),
                formatting.duration(point.ttft["p50"].value),
                formatting.duration(point.ttft["p95"].value),
                findings.range_text(point.ttft["p95"]),
                formatting.duration(point.tpot["p95"].value),
            ],
        )
        for point in plan.curve[1::2]
    ]
    columns = [">requests/s", ">TTFT p50", ">TTFT p95", "80% interval", ">TPOT p95"]
    return html_report.plot_section(
        "Latency against load",
        f"p95 of the chosen deployment; it saturates at {findings.rate(plan.chosen.max_rate.value)} requests/s",
        "plot-latency",
        below=html_report.table(columns, rows, wide=True),
    )


def _latency_figure(plan: LoadPlan) -> Figure:
    """Return TTFT above and TPOT below over the rate, with their limits, this load and the saturation."""
    layout = plain_layout(420)
    rates = [point.rate for point in plan.curve]
    most = 1.04 * plan.chosen.max_rate.value
    layout["xaxis"] |= {"title": axis_title("requests/s"), "range": [0, most], "showgrid": False, "anchor": "y2"}
    layout["yaxis2"] = dict(layout["yaxis"])
    traces: list[Figure] = []
    annotations = [axis_name("TTFT p95"), axis_name("TPOT p95", 0.36)]
    shapes = [
        vertical_line(plan.chosen.max_rate.value, "@bad", "dash"),
        vertical_line(min(plan.chosen.rate, most), "@ink"),
    ]
    for name, axis, domain in (("ttft", "yaxis", [0.5, 1.0]), ("tpot", "yaxis2", [0.0, 0.36])):
        intervals = [getattr(point, name)["p95"] for point in plan.curve]
        milliseconds = [1e3 * interval.value for interval in intervals]
        limit = plan.slo.get(name, {}).get("p95")
        top = max(milliseconds)
        highs = [min(1e3 * interval.high, 4 * top) for interval in intervals]
        lows = [1e3 * interval.low for interval in intervals]
        edges = [*lows, *([1e3 * limit] if limit else [])]
        layout[axis] |= log_axis(min(edges), max(2 * top, *edges), lambda value: formatting.setting(value / 1e3))
        layout[axis] |= {"domain": domain, "range": log_range(min(edges), max(2 * top, *edges))}
        reference = "y" if axis == "yaxis" else "y2"
        traces += [
            {
                **{"type": "scatter", "mode": "lines", "x": [*rates, *rates[::-1]], "y": [*highs, *lows[::-1]]},
                **{"fill": "toself", "fillcolor": "@accent/20", "line": {"width": 0}, "hoverinfo": "skip"},
                "yaxis": reference,
            },
            {
                **{"type": "scatter", "mode": "lines+markers", "x": rates, "y": milliseconds, "yaxis": reference},
                **{"line": {"color": "@accent", "width": 2.5}, "marker": {"size": 5, "color": "@accent"}},
                "hovertext": [
                    f"<b>{findings.rate(point.rate)} requests/s</b><br>{findings.latency_text(interval)}"
                    for point, interval in zip(plan.curve, intervals, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
            },
        ]
        if limit:
            line = {"color": "@slower", "width": 1.5, "dash": "dot"}
            ends = {"x0": 0, "x1": most, "y0": 1e3 * limit, "y1": 1e3 * limit}
            shapes.append({"type": "line", "xref": "x", "yref": reference, **ends, "line": line})
            text = f"limit {formatting.setting(limit)}"
            annotations.append(label(0, math.log10(1e3 * limit), text, "left", reference, -10) | {"xref": "paper"})
    annotations.append(label(plan.chosen.max_rate.value, 1.0, "saturation", "right", "paper", -8, -4))
    layout |= {"shapes": shapes, "annotations": annotations}
    return {"data": traces, "layout": layout}


def _front_section(plan: LoadPlan, figures: dict[str, Figure]) -> Markup:
    front = _front(plan)
    figures["plot-front"] = _front_figure(plan, front)
    rows = [
        (
            "",
            [
                str(point.layout),
                point.instance,
                formatting.count(round(point.tokens_per_second_per_user)),
                formatting.count(round(point.tokens_per_second_per_gpu)),
                findings.rate(point.rate_per_replica),
                html_report.chip(PART_COLORS[point.limit], point.limit),
            ],
        )
        for point in front[:: max(1, math.ceil(len(front) / FRONT_ROWS))]
    ]
    columns = ["=layout", "instance", ">tokens/s/user", ">tokens/s/GPU", ">requests/s/replica", "limit"]
    legend = " ".join(
        html_report.chip(PART_COLORS[name], name) for name in dict.fromkeys(point.limit for point in plan.front)
    )
    return html_report.plot_section(
        "Throughput per GPU and per user",
        "Every layout at rising load; the line is the front that nothing beats in both",
        "plot-front",
        below=Markup(
            f'<p class="legend">Largest part of a step: {legend}</p>{html_report.table(columns, rows, wide=True)}'
        ),
    )


def _front(plan: LoadPlan) -> list[FrontPoint]:
    """Return the points of all instances that none beats in both, by tokens/s of a user."""
    ordered = sorted(
        plan.front, key=lambda point: (-point.tokens_per_second_per_user, -point.tokens_per_second_per_gpu)
    )
    front: list[FrontPoint] = []
    for point in ordered:
        if not front or point.tokens_per_second_per_gpu > front[-1].tokens_per_second_per_gpu:
            front.append(point)
    return front


def _front_figure(plan: LoadPlan, front: list[FrontPoint]) -> Figure:
    def text(point: FrontPoint) -> str:
        return (
            f"<b>{escape(str(point.layout))}</b> on {escape(point.instance)}<br>"
            f"{findings.rate(point.rate_per_replica)} requests/s per replica<br>largest part: {point.limit}"
        )

    users = [point.tokens_per_second_per_user for point in plan.front]
    gpus = [point.tokens_per_second_per_gpu for point in plan.front]
    layout = plain_layout(360)
    layout["xaxis"] |= {"title": axis_title("tokens/s of one user"), "showgrid": False}
    layout["xaxis"] |= log_axis(min(users), max(users), formatting.count)
    layout["yaxis"] |= log_axis(min(gpus), max(gpus), formatting.count)
    layout["annotations"] = [axis_name("output tokens/s per GPU")]
    chosen = plan.chosen
    return {
        "data": [
            {
                **{"type": "scatter", "mode": "markers", "x": users, "y": gpus},
                "marker": {
                    "size": 7,
                    "opacity": 0.55,
                    "color": [PART_COLORS[point.limit] for point in plan.front],
                },
                "hovertext": [text(point) for point in plan.front],
                "hovertemplate": "%{hovertext}<extra></extra>",
            },
            {
                **{"type": "scatter", "mode": "lines", "hoverinfo": "skip"},
                "x": [point.tokens_per_second_per_user for point in front],
                "y": [point.tokens_per_second_per_gpu for point in front],
                "line": {"color": "@accent", "width": 2},
            },
            {
                **{"type": "scatter", "mode": "markers"},
                "x": [chosen.tokens_per_second_per_user.value],
                "y": [chosen.tokens_per_second_per_gpu.value],
                "marker": {"size": 15, "symbol": "diamond", "color": "@ink", "line": {"color": "@surface", "width": 2}},
                "hovertext": [f"<b>this load</b><br>{escape(findings.deployment_text(chosen))}"],
                "hovertemplate": "%{hovertext}<extra></extra>",
            },
        ],
        "layout": layout,
    }


def _limits_section(plan: LoadPlan) -> Markup:
    rows = [
        ("", [html_report.chip(PART_COLORS[name], name), formatting.percent(share)])
        for name, share in plan.chosen.bottleneck.items()
    ]
    text = (
        f"Prefill takes {formatting.percent(plan.chosen.prefill_share)} of the time; {plan.chosen.limit} saturates it"
    )
    return html_report.section("What limits it", text, html_report.table(["part of a step", ">share"], rows))


def _deployments_section(plan: LoadPlan) -> Markup:
    columns = deployment_columns(plan, detailed=True)
    rows = [
        ("chosen" if row is plan.chosen else "", [column.text(row) for column in columns]) for row in plan.deployments
    ]
    marks = {"deployment": "=", "": ""}
    names = [f"{marks.get(column.title, '>' if column.is_number else '')}{column.title}" for column in columns]
    heading = deployment_heading(plan, len(plan.deployments))
    text = f"{heading[:1].upper()}{heading[1:]}; dollars of whole nodes, per million tokens at this load"
    return html_report.section("Deployments", text, html_report.table(names, rows, wide=True))


def _basis_section(plan: LoadPlan) -> Markup:
    facts = [("load", findings.load_text(plan)), *fields(plan)[1:]]
    rows = [("", [name, html_report.with_code(text)]) for name, text in facts]
    return html_report.section("Basis", "The inputs of this plan", html_report.table(["=", ""], rows))
