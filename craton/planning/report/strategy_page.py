"""The plan of strategies as one HTML file: accuracy against dollars and against tokens, and every number in a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from importlib.resources import files

from craton import formatting, html_report
from craton.html_report import Figure, Markup, axis_name, axis_title, log_axis, log_range, plain_layout
from craton.planning.report.strategy_tables import (
    THOUSAND,
    best_text,
    known_text,
    mark_of,
    per_thousand_solved,
    strategy_fields,
)
from craton.planning.result import INTERVAL_LEVEL
from craton.planning.strategies import PlannedStrategy, StrategiesPlan

_COLORS = {
    "sample": "@ink",
    "best_of": "@faster",
    "vote": "@accent",
    "stopped": "@optimizer",
    "search": "@communication",
}
_NAMES = {
    "sample": "one sample",
    "best_of": "best of n, by a verifier that is always right",
    "vote": "full vote",
    "stopped": "vote that ends early",
    "search": "search, budget, other scores (measured)",
}


def strategies_html(plan: StrategiesPlan) -> str:
    """Return the page."""
    figures: dict[str, Figure] = {}
    body = _header(plan) + _tiles(plan)
    if any(row.price.dollars for row in plan.rows):
        figures["plot-dollars"] = _figure(
            plan,
            lambda row: (row.price.dollars or 0.0) * THOUSAND or None,
            "dollars per 1,000 problems",
            formatting.dollars,
        )
        body += html_report.plot_section(
            "Accuracy and dollars", f"Best: {best_text(plan.best, 'no strategy')}", "plot-dollars", below=_legend(plan)
        )
    if plan.lengths is not None:
        figures["plot-tokens"] = _figure(
            plan, lambda row: row.usage.tokens if row.usage else None, "tokens per problem", formatting.count
        )
        body += html_report.plot_section(
            "Accuracy and tokens", "What more tokens are worth, by strategy", "plot-tokens", below=_legend(plan)
        )
    body += html_report.section("Strategies", "Predicted beside measured, and the cost of one problem", _table(plan))
    body += html_report.warning_list("Assumptions", plan.notes)
    footer = f"""Intervals should contain {formatting.percent(INTERVAL_LEVEL)} of measurements. Filled markers are on
the front: no cheaper strategy is as accurate. As JSON: <code>craton plan --eval SUITE --json</code>."""
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return html_report.page_html(f"{plan.title}: strategies", Markup(body), figures, Markup(footer), style)


def _header(plan: StrategiesPlan) -> Markup:
    facts = "".join(
        f'<p class="facts"><b>{escape(title.capitalize())}</b> {escape(text)}</p>\n'
        for title, text in strategy_fields(plan)[1:]
    )
    return Markup(f"""<header>
<div class="eyebrow">Craton plan · test-time compute</div>
<h1>{escape(plan.title)}</h1>
<p class="verdict">{escape(known_text(plan))}</p>
{facts}</header>
""")


def _tiles(plan: StrategiesPlan) -> Markup:
    shown = []
    for title, row in (
        ("One sample", plan.rows[0]),
        ("Best without a verifier", plan.best),
        ("Best of n, verified", plan.best_with_truth),
    ):
        if row is None or row.accuracy is None:
            continue
        interval = formatting.percent_range(row.predicted.low, row.predicted.high) if row.predicted else ""
        note = f"{row.name}{f', n {row.n}' if row.n > 1 else ''}"
        if row.price.dollars is not None:
            note += f"; {formatting.dollars(row.price.dollars * THOUSAND)} per 1,000 problems"
        shown.append(html_report.Tile(title, formatting.percent(row.accuracy), note, interval))
    return html_report.tiles(shown)


def _group(row: PlannedStrategy) -> str:
    kind = row.shape.kind
    if kind == "vote" and row.shape.stop:
        return "stopped"
    if kind == "best_of" and not row.needs_truth:
        return "search"
    return kind if kind in _COLORS else "search"


def _legend(plan: StrategiesPlan) -> Markup:
    groups = dict.fromkeys(_group(row) for row in plan.rows if row.accuracy is not None)
    chips = " ".join(html_report.chip(_COLORS[group], _NAMES[group]) for group in groups)
    return Markup(f'<p class="legend">{chips}</p>')


def _figure(
    plan: StrategiesPlan, cost: Callable[[PlannedStrategy], float | None], title: str, name: Callable[[float], str]
) -> Figure:
    """Return accuracy against a cost: a line per kind of strategy, with intervals where it is predicted."""
    points = [(cost(row), row) for row in plan.rows if row.accuracy is not None]
    shown = [(value, row) for value, row in points if value is not None]
    traces = []
    for group in dict.fromkeys(_group(row) for _, row in shown):
        members = sorted(((value, row) for value, row in shown if _group(row) == group), key=lambda pair: pair[0])
        traces.append(_trace(plan, group, members))
    values = [value for value, _ in shown] or [1.0, 10.0]
    layout = plain_layout(360)
    layout["xaxis"] |= {"title": axis_title(title), "showgrid": False}
    layout["xaxis"] |= log_axis(min(values), max(values), name)
    layout["xaxis"]["range"] = log_range(min(values), max(values))
    layout["yaxis"] |= {"ticksuffix": "%", "nticks": 7}
    layout["annotations"] = [axis_name("problems solved")]
    return {"data": traces, "layout": layout}


def _trace(plan: StrategiesPlan, group: str, members: list[tuple[float, PlannedStrategy]]) -> Figure:
    color = _COLORS[group]
    rows = [row for _, row in members]
    shares = [100 * (row.accuracy or 0.0) for row in rows]
    lows = [
        share - 100 * row.predicted.low if row.predicted and not row.measured else 0.0
        for share, row in zip(shares, rows, strict=True)
    ]
    highs = [
        100 * row.predicted.high - share if row.predicted and not row.measured else 0.0
        for share, row in zip(shares, rows, strict=True)
    ]
    hover = [
        f"<b>{escape(row.name)}{f', n {row.n}' if row.n > 1 else ''}</b><br>{formatting.percent(row.accuracy)} "
        f"{'measured' if row.measured else 'predicted'}"
        + (f"<br>{formatting.count(round(row.usage.tokens))} tokens" if row.usage else "")
        for row in rows
    ]
    best = [mark_of(plan, row) == "◆" for row in rows]
    return {
        "type": "scatter",
        "mode": "lines+markers" if group != "search" else "markers",
        "x": [value for value, _ in members],
        "y": shares,
        "line": {"color": color, "width": 2},
        "marker": {
            "opacity": 1,
            "size": [15 if is_best else 9 for is_best in best],
            "symbol": ["diamond" if is_best else "circle" for is_best in best],
            "color": [color if row.is_on_front else "@surface" for row in rows],
            "line": {"color": color, "width": 1.5},
        },
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": highs,
            "arrayminus": lows,
            "color": color,
            "thickness": 1,
            "width": 3,
        },
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
    }


def _table(plan: StrategiesPlan) -> Markup:
    columns = (
        "",
        "=strategy",
        ">n",
        ">predicted",
        "80% interval",
        ">measured",
        "inside",
        ">tokens",
        ">KV cache",
        ">latency",
        ">$ per 1k",
        ">$ per 1k solved",
    )
    return html_report.table(
        columns, [("chosen" if mark_of(plan, row) == "◆" else "", _cells(plan, row)) for row in plan.rows], wide=True
    )


def _cells(plan: StrategiesPlan, row: PlannedStrategy) -> list[str]:
    predicted, measured, usage, price = row.predicted, row.measured, row.usage, row.price
    kv_cache = (
        formatting.memory(price.kv_bytes)
        if price.kv_bytes
        else f"{formatting.count(round(usage.kv_tokens))} tokens"
        if usage
        else ""
    )
    return [
        mark_of(plan, row),
        row.name,
        str(row.n),
        formatting.percent(predicted.accuracy) if predicted else "",
        formatting.percent_range(predicted.low, predicted.high) if predicted else "",
        formatting.percent(measured.accuracy) if measured else "",
        {True: "yes", False: "no", None: ""}[row.is_inside],
        formatting.count(round(usage.tokens)) if usage else "",
        kv_cache,
        formatting.duration(price.latency_seconds)
        if price.latency_seconds and math.isfinite(price.latency_seconds)
        else "",
        formatting.dollars(price.dollars * THOUSAND) if price.dollars is not None else "",
        per_thousand_solved(row) if row.dollars_per_solved else "",
    ]
