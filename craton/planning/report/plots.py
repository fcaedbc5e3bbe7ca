"""The plots of a plan as plotly figures in plain dicts, in the colours of the page's style sheet.

Every text from a user is escaped, because plotly interprets HTML tags.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from craton import formatting
from craton.html_report import Figure, axis_name, axis_title, label, log_axis, log_range, plain_layout, vertical_line
from craton.planning.report import findings
from craton.planning.result import Plan
from craton.telemetry import step_phases

NUM_MEMORY_COLORS = 8
_TINTS = (100, 70, 50, 36, 26)
_GIBIBYTE = 2**30
_ROW_PIXELS = 46


def step_figure(plan: Plan) -> Figure:
    """Return one row per phase, stacked by part, and below them the communication hidden behind compute."""
    scale, unit = (1.0, "seconds") if plan.step_seconds >= 0.1 else (1e3, "milliseconds")
    rows = [phase for phase in step_phases(plan.phases) if plan.phases.get(phase, 0.0) > 0]
    hidden = plan.hidden_communication_seconds
    traces, labels = [], []
    for row, phase in enumerate(rows):
        seconds = plan.phases[phase]
        note = {"communication": ", exposed", "checkpoint": ", blocked"}.get(phase, "")
        labels.append((row, f"<b>{phase}</b>{note}", _seconds_and_share(seconds, plan)))
        for index, (name, part_seconds) in enumerate(findings.shown_parts(plan, phase)):
            hover = f"{escape(name)}<br>{_seconds_and_share(part_seconds, plan)}"
            traces.append(_bar(row, part_seconds * scale, part_color(phase, index), hover))
    if hidden > 0:
        labels.append((len(rows), "communication, hidden behind compute", formatting.duration(hidden)))
        bar = _bar(len(rows), hidden * scale, "@communication/30", f"hidden<br>{formatting.duration(hidden)}")
        bar["marker"] |= {"pattern": {"shape": "/", "size": 6, "solidity": 0.35, "fgcolor": "@communication"}}
        traces.append(bar)
    longest = max([*plan.phases.values(), hidden]) * scale
    return _rows_figure(traces, labels, f"{unit} of one step", [0, longest * 1.02])


def memory_figure(plan: Plan) -> Figure:
    """Return the worst instant stacked by part, the other instants below it, and a line at the GPU's memory."""
    limit = plan.memory_limit_bytes / _GIBIBYTE
    traces = [
        _bar(0, size / _GIBIBYTE, memory_color(index), f"{escape(name)}<br>{formatting.memory(size)}")
        for index, (name, size) in enumerate(memory_rows(plan))
    ]
    instants = sorted(plan.memory_instants.items(), key=lambda instant: -instant[1])
    worst = instants[0][0] if instants else "worst instant"
    labels = [(0, f"<b>{escape(worst)}</b>  {formatting.memory(plan.memory_bytes)}", "")]
    for row, (name, size) in enumerate(instants[1:], 1):
        labels.append((row, f"{escape(name)}  {formatting.memory(size)}", ""))
        traces.append(_bar(row, size / _GIBIBYTE, "@muted/45", f"{escape(name)}<br>{formatting.memory(size)}"))
    unit, has = findings.memory_unit(plan)
    figure = _rows_figure(traces, labels, f"GiB on one {unit}", [0, max(limit, plan.memory_bytes / _GIBIBYTE) * 1.03])
    figure["layout"]["height"] += 30
    figure["layout"]["margin"]["t"] += 30
    figure["layout"]["shapes"] = [vertical_line(limit, "@ink" if plan.fits else "@bad", dash="solid")]
    # Left of the line where there is room, so that the label never leaves the plot.
    side = "right" if limit > 0.5 * plan.memory_bytes / _GIBIBYTE else "left"
    card = f"{has} {formatting.memory(plan.memory_limit_bytes)}"
    figure["layout"]["annotations"].append(label(limit, 1, card, side, yshift=20))
    return figure


def front_figure(plan: Plan) -> Figure:
    """Return run time against cost: one numbered point per cluster, in the order of the table beside it."""
    rows = [(number, candidate, chosen) for number, (candidate, chosen) in enumerate(findings.candidates(plan), 1)]
    priced = [(number, candidate, chosen) for number, candidate, chosen in rows if candidate.cost_dollars is not None]
    everyone = [candidate for _, candidate, _ in priced]
    unit_seconds, unit = (
        (86400.0, "days") if max(candidate.run_seconds for candidate in everyone) >= 2 * 86400 else (3600.0, "h")
    )
    on_front = [candidate for candidate in everyone if findings.is_on_front(candidate, everyone)]
    times = [candidate.run_seconds / unit_seconds for candidate in everyone]
    hover = [
        f"<b>{escape(candidate.cluster)}</b><br>{formatting.duration(candidate.run_seconds)}, "
        f"{formatting.dollars(candidate.cost_dollars or 0.0)}<br>{escape(str(candidate.layout))}<br>"
        f"{escape(candidate.reason)}"
        for candidate in everyone
    ]
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": [candidate.run_seconds / unit_seconds for candidate in on_front],
        "y": [element.cost_dollars for element in on_front],
        "line": {"color": "@accent/45", "width": 2},
        "hoverinfo": "skip",
    }
    points = {
        "type": "scatter",
        "mode": "markers+text",
        "x": times,
        "y": [entry.cost_dollars for entry in everyone],
        "text": [str(number) for number, _, _ in priced],
        "textfont": {"color": ["@surface" if chosen else "@ink" for _, _, chosen in priced], "size": 11},
        "marker": {
            "size": 22,
            "color": ["@accent" if chosen else "@surface" for _, _, chosen in priced],
            "line": {"color": ["@accent" if item in on_front else "@muted" for item in everyone], "width": 1.5},
        },
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
    }
    layout = plain_layout(320)
    layout["xaxis"] |= {"title": axis_title(f"run time, {unit}"), "showgrid": False}
    if max(times) > 8 * min(times):
        layout["xaxis"] |= log_axis(min(times), max(times), formatting.count)
    layout["yaxis"] |= {"tickprefix": "$", "tickformat": "~s", "nticks": 6}
    layout["annotations"] = [axis_name("cost, $")]
    return {"data": [line, points], "layout": layout}


def scaling_figure(plan: Plan) -> Figure:
    """Tokens per second above, efficiency below, over the same number of GPUs."""
    points = findings.scaling_points(plan)
    gpus = [point.num_gpus for point in points]
    tokens = [point.tokens_per_second for point in points]
    ideal = [tokens[0] / gpus[0] * count for count in gpus]
    efficiencies = [100 * share for share in findings.scaling_efficiencies(plan)]
    sizes = [12 if count == plan.cluster.num_gpus else 7 for count in gpus]
    hover = [
        f"<b>{point.num_gpus:,} GPUs</b><br>{formatting.count(point.tokens_per_second)} tokens/s"
        f"<br>step {formatting.duration(point.step_seconds)}<br>{escape(str(point.layout))}"
        for point in points
    ]
    layout = plain_layout(390)
    every = math.ceil(len(gpus) / 6)
    shown = gpus[::-1][::every][::-1]
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": shown,
        "ticktext": [f"{count:,}" for count in shown],
        "range": log_range(gpus[0], gpus[-1]),
        "title": axis_title("GPUs"),
        "showgrid": False,
        "anchor": "y2",
    }
    layout["yaxis"] |= {
        "domain": [0.42, 1.0],
    }
    layout["yaxis2"] = layout["yaxis"] | {
        "domain": [0.0, 0.24],
        "dtick": 50,
        "range": [0, max(105.0, 1.05 * max(efficiencies))],
    }
    layout["yaxis"] |= log_axis(min(tokens), ideal[-1], formatting.count)
    layout["annotations"] = [
        axis_name("tokens/s"),
        axis_name("efficiency, % of ideal", 0.24),
        label(math.log10(gpus[-1]), math.log10(ideal[-1]), "ideal", "right", "y", 6, -22),
    ]
    dashed = {"color": "@muted", "width": 1.5, "dash": "dot"}
    solid = {"color": "@accent", "width": 2.5}
    marker = {"size": sizes, "opacity": 1, "color": "@accent", "line": {"color": "@surface", "width": 1.5}}
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": gpus,
        "line": solid,
        "marker": marker,
        "cliponaxis": False,
    }
    return {
        "data": [
            {"type": "scatter", "mode": "lines", "x": gpus, "y": ideal, "line": dashed, "hoverinfo": "skip"},
            curve | {"y": tokens, "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>"},
            curve | {"y": efficiencies, "yaxis": "y2", "hovertemplate": "%{x:,} GPUs<br>%{y:.1f}%<extra></extra>"},
        ],
        "layout": layout,
    }


def goodput_figure(plan: Plan) -> Figure:
    """Productive share of wall time over the checkpoint interval, with the chosen interval marked."""
    goodput = plan.goodput
    intervals = [seconds for seconds, _ in goodput.curve]
    shares = [100 * share for _, share in goodput.curve]
    chosen = 100 * goodput.goodput
    # Very short intervals, where checkpoints dominate, would flatten the useful part of the curve.
    lowest = max(min([*shares, 100 * goodput.goodput_low]), 2 * chosen - 100 - 15, 0.0)
    margin = (max([*shares, 100 * goodput.goodput_high]) - lowest) * 0.08
    layout = plain_layout(320)
    ticks = [
        tick for tick in (1, 10, 60, 600, 3600, 36000, 345600) if intervals[0] * 0.7 <= tick <= intervals[-1] * 1.4
    ]
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [formatting.setting(tick) for tick in ticks],
        "range": log_range(min([*intervals, goodput.interval_seconds]), max([*intervals, goodput.interval_seconds])),
        "title": axis_title("checkpoint interval"),
        "showgrid": False,
    }
    layout["yaxis"] |= {
        "range": [lowest - margin, max([*shares, 100 * goodput.goodput_high]) + margin],
        "nticks": 6,
    }
    layout["shapes"] = [vertical_line(goodput.interval_seconds, "@muted")]
    left_half = goodput.interval_seconds < math.sqrt(intervals[0] * intervals[-1])
    layout["annotations"] = [
        axis_name("goodput, % of wall time"),
        label(
            math.log10(goodput.interval_seconds),
            0,
            f"chosen: every {formatting.setting(goodput.interval_seconds)}",
            "left" if left_half else "right",
            yshift=14,
            xshift=8 if left_half else -8,
        ),
    ]
    curve = {
        "type": "scatter",
        "mode": "lines",
        "x": intervals,
        "y": shares,
        "line": {"color": "@accent", "width": 2.5, "shape": "spline"},
        "hovertext": [formatting.setting(seconds) for seconds in intervals],
        "hovertemplate": "every %{hovertext}<br>%{y:.2f}%<extra></extra>",
    }
    mark = {
        "type": "scatter",
        "mode": "markers",
        "x": [goodput.interval_seconds],
        "y": [chosen],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [100 * (goodput.goodput_high - goodput.goodput)],
            "arrayminus": [100 * (goodput.goodput - goodput.goodput_low)],
            "color": "@accent",
            "thickness": 1.5,
            "width": 5,
        },
        "marker": {"size": 12, "color": "@accent", "line": {"color": "@surface", "width": 2}},
        "hovertemplate": f"chosen<br>{formatting.percent(goodput.goodput)}, {findings.INTERVAL_NAME} "
        f"{formatting.percent_range(goodput.goodput_low, goodput.goodput_high)}<extra></extra>",
    }
    return {"data": [curve, mark], "layout": layout}


def sensitivity_figure(plan: Plan) -> Figure:
    """Return a tornado plot: the largest effect on top; right is slower."""
    largest = sorted(plan.sensitivities, key=lambda one: -abs(one.effect))
    traces, labels = [], []
    for row, sensitivity in enumerate(largest):
        name = escape(f"{sensitivity.name} {sensitivity.change}".strip())
        effect = findings.effect_text(sensitivity)
        labels.append((row, name, f"<b>{effect}</b>"))
        traces.append(
            _bar(
                row, 100 * sensitivity.effect, "@slower" if sensitivity.effect > 0 else "@faster", f"{name}<br>{effect}"
            )
        )
    widest = max(max(abs(element.effect) for element in largest) * 100, 1.0)
    below = min(0.0, *(100 * entry.effect for entry in largest))
    above = max(0.0, *(100 * item.effect for item in largest))
    figure = _rows_figure(traces, labels, "change of the step time, %", [below - 0.02 * widest, above + 0.02 * widest])
    figure["layout"]["xaxis"] |= {"zeroline": True, "zerolinecolor": "@ink", "zerolinewidth": 1}
    return figure


def memory_rows(plan: Plan) -> list[tuple[str, float]]:
    return sorted(((name, size) for name, size in plan.memory_parts.items() if size > 0), key=lambda part: -part[1])


def part_color(phase: str, index: int) -> str:
    """Parts of a phase share its hue and get paler in the order of their size."""
    return f"@{phase}/{_TINTS[min(index, len(_TINTS) - 1)]}"


def memory_color(index: int) -> str:
    return f"@memory-{index % NUM_MEMORY_COLORS + 1}"


def _rows_figure(
    traces: list[dict[str, Any]], labels: list[tuple[int, str, str]], unit: str, span: list[float]
) -> Figure:
    """Return horizontal bars with their names above them, so that the bars use the whole width of a phone."""
    num_rows = max((row for row, _, _ in labels), default=0) + 1
    layout = plain_layout(num_rows * _ROW_PIXELS + 66)
    layout |= {"barmode": "relative", "bargap": 0.62, "margin": {"l": 0, "r": 8, "t": 18, "b": 42}}
    layout["xaxis"] |= {"title": axis_title(unit), "range": span, "nticks": 6, "showgrid": False}
    layout["yaxis"] |= {"visible": False, "range": [num_rows - 0.6, -0.5]}
    layout["annotations"] = [
        annotation
        for row, name, value in labels
        for annotation in (_row_label(row, name, 0.0, "left"), _row_label(row, value, 1.0, "right"))
        if annotation["text"]
    ]
    return {"data": traces, "layout": layout}


def _row_label(row: int, text: str, x: float, side: str) -> dict[str, Any]:
    return {
        "xref": "paper",
        "x": x,
        "xanchor": side,
        "yref": "y",
        "y": row,
        "yshift": 19,
        "text": text,
        "showarrow": False,
        "font": {"color": "@ink", "size": 13},
        "bgcolor": "@surface",  # a line at zero or at the limit passes behind the text
    }


def _bar(row: int, value: float, color: str, hover: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": [row],
        "x": [value],
        "marker": {"color": color, "line": {"color": "@surface", "width": 1}},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def _seconds_and_share(seconds: float, plan: Plan) -> str:
    return f"{formatting.duration(seconds)} · {formatting.percent(seconds / plan.step_seconds)}"
