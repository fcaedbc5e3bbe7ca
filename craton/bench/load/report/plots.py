"""The plots of a load test as plotly figures in plain dicts, with colours of the page's style sheet.

Figures are downsampled to screen resolution, so that a page stays small for long loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from craton.bench.load.benchmark import Level
from craton.bench.load.load import Open
from craton.bench.load.samples import Objectives, RequestSample
from craton.bench.load.summary import timeline
from craton.formatting import digits, duration, setting
from craton.html_report import Figure, axis_name, axis_title, label, log_axis, log_range, plain_layout, vertical_line

FIRST, BETWEEN = "@first", "@between"  # time to first token, and between tokens
_LEFT_PIXELS = 48  # tick labels with durations are wide
_CURVE_POINTS = 400
_SCATTER_POINTS = 2000
# Chunks that arrive together have a gap of 0, which a logarithmic axis cannot show.
_SHORTEST_SECONDS = 1e-5


def distribution_figure(samples: Sequence[RequestSample], objectives: Objectives | None) -> Figure:
    """Return the cumulative distributions of TTFT and ITL; objectives as dashed lines."""
    answered = [sample for sample in samples if not sample.error]
    firsts = np.array([sample.ttft_seconds for sample in answered])
    gaps = np.concatenate([sample.gap_seconds for sample in answered])
    layout = plain_layout(330, _LEFT_PIXELS)
    curves = [
        (name, _quantiles(values), color)
        for name, values, color in (("TTFT", firsts, FIRST), ("ITL", gaps, BETWEEN))
        if len(values)
    ]
    # The fastest 1%, such as chunks that arrived together, would stretch the axis by decades.
    lowest = min(seconds[_CURVE_POINTS // 100] for _, seconds, _ in curves)
    highest = max(seconds[-1] for _, seconds, _ in curves)
    limits = dict(objectives.seconds) if objectives else {}
    marks = [(limits[name], color) for name, color in (("ttft", FIRST), ("itl", BETWEEN)) if name in limits]
    layout["xaxis"] |= _seconds_axis(min([lowest, *(at for at, _ in marks)]), max([highest, *(at for at, _ in marks)]))
    layout["yaxis"] |= {"range": [0, 103], "ticksuffix": "%", "nticks": 6}
    layout["shapes"] = [vertical_line(at, color) for at, color in marks]
    layout["annotations"] = [axis_name("share of requests or gaps within")]
    for name, seconds, color in curves:
        middle = math.log10(seconds[len(seconds) // 2])
        font = {"color": color, "size": 13}
        layout["annotations"].append(label(middle, 50, f"<b>{name}</b>", "left", "y", xshift=8) | {"font": font})
    shares = np.linspace(0, 100, _CURVE_POINTS + 1)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": _rounded(seconds),
            "y": _rounded(shares),
            "line": {"color": color, "width": 2.5},
            "hovertext": [f"{name} ≤ {duration(float(value))}" for value in seconds],
            "hovertemplate": "%{y:.1f}%<br>%{hovertext}<extra></extra>",
        }
        for name, seconds, color in curves
    ]
    return {"data": traces, "layout": layout}


def timeline_figure(samples: Sequence[RequestSample]) -> Figure:
    """Return running requests, and below them output tokens/s, over time."""
    course = timeline(samples)
    layout = plain_layout(390, _LEFT_PIXELS)
    layout["xaxis"] |= {"title": axis_title("seconds after the start"), "showgrid": False, "anchor": "y2"}
    layout["yaxis"] |= {"domain": [0.58, 1.0], "rangemode": "tozero", "nticks": 4}
    layout["yaxis2"] = layout["yaxis"] | {"domain": [0.0, 0.42], "tickformat": "~s"}
    layout["annotations"] = [axis_name("running requests"), axis_name("output tokens/s", 0.42)]
    area = {"type": "scatter", "mode": "lines", "x": _rounded(course.seconds), "fill": "tozeroy"}
    return {
        "data": [
            area
            | {
                "y": _rounded(course.running),
                "line": {"color": "@accent", "width": 1.5, "shape": "hvh"},
                "fillcolor": "@accent~20",
                "hovertemplate": "%{x:.1f} s<br>%{y:.1f} running<extra></extra>",
            },
            area
            | {
                "y": _rounded(course.tokens_per_second),
                "yaxis": "y2",
                "line": {"color": BETWEEN, "width": 1.5, "shape": "hvh"},
                "fillcolor": f"{BETWEEN}~20",
                "hovertemplate": "%{x:.1f} s<br>%{y:,.0f} tokens/s<extra></extra>",
            },
        ],
        "layout": layout,
    }


def prompt_figure(samples: Sequence[RequestSample]) -> Figure:
    """Return TTFT over prompt length, one point per request."""
    answered = [sample for sample in samples if not sample.error and sample.prompt_tokens is not None]
    points = answered[:: math.ceil(len(answered) / _SCATTER_POINTS)]
    firsts = [sample.ttft_seconds or 0.0 for sample in points]
    layout = plain_layout(330, _LEFT_PIXELS)
    layout["xaxis"] |= {"title": axis_title("tokens of the prompt"), "showgrid": False, "nticks": 8}
    scale, unit = (1.0, "s") if max(firsts) >= 1 else (1e3, "ms")
    layout["yaxis"] |= {"rangemode": "tozero", "nticks": 6}
    layout["annotations"] = [axis_name(f"TTFT, {unit}")]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [sample.prompt_tokens for sample in points],
        "y": _rounded([scale * seconds for seconds in firsts]),
        "marker": {"size": 6, "color": f"{FIRST}~55"},
        "cliponaxis": False,
        "hovertext": [_hover(sample) for sample in points],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def sweep_figure(levels: Sequence[Level]) -> Figure:
    """Return throughput, and below it latencies, over the offered rate; hollow markers for levels that failed."""
    rates = [level.load.requests_per_second if isinstance(level.load, Open) else 0.0 for level in levels]
    layout = plain_layout(440, _LEFT_PIXELS)
    layout["xaxis"] |= {
        "type": "log",
        "title": axis_title("offered requests/s"),
        "tickvals": _ticks(rates),
        "ticktext": [digits(value) for value in _ticks(rates)],
        "range": log_range(min(rates), max(rates)),
        "showgrid": False,
        "anchor": "y2",
    }
    layout["yaxis"] |= {"domain": [0.62, 1.0], "rangemode": "tozero", "nticks": 4, "tickformat": "~s"}
    traces = [
        _curve(
            levels,
            rates,
            [level.summary.output_tokens_per_second for level in levels],
            "@accent",
            "output tokens/s",
            "y",
        )
    ]
    shown = []
    for name, field, color in (("TTFT", "ttft_seconds", FIRST), ("ITL", "itl_seconds", BETWEEN)):
        for percentile, dash in (("p50", "solid"), ("p99", "dot")):
            values = [getattr(getattr(level.summary, field), percentile, None) for level in levels]
            clamped = [max(value, _SHORTEST_SECONDS) if value is not None else None for value in values]
            shown += [value for value in clamped if value is not None]
            traces.append(_curve(levels, rates, clamped, color, f"{name} {percentile}", "y2", dash))
    layout["yaxis2"] = layout["yaxis"] | {"domain": [0.0, 0.46]}
    layout["annotations"] = [axis_name("output tokens/s"), axis_name("TTFT and ITL: p50, dotted p99", 0.46)]
    if shown:
        layout["yaxis2"] |= _seconds_axis(min(shown), max(shown))
    return {"data": traces, "layout": layout}


def _curve(
    levels: Sequence[Level],
    rates: list[float],
    values: Sequence[float | None],
    color: str,
    name: str,
    axis: str,
    dash: str = "solid",
) -> dict[str, Any]:
    as_text = duration if axis == "y2" else lambda value: digits(value or 0)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": rates,
        "y": values,
        "yaxis": axis,
        "line": {"color": color, "width": 2.5 if dash == "solid" else 1.5, "dash": dash},
        "marker": {
            "size": 9,
            "symbol": ["circle-open" if level.trouble else "circle" for level in levels],
            "color": color,
            "line": {"color": color, "width": 1.5},
        },
        "hovertext": [
            f"<b>{digits(rate)} requests/s</b><br>{name} {as_text(value)}"
            for rate, value in zip(rates, values, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
    }


def _hover(sample: RequestSample) -> str:
    cached = f", {sample.cached_tokens:,} cached" if sample.cached_tokens else ""
    when = f"TTFT {duration(sample.ttft_seconds)}<br>due at {duration(sample.due_seconds)}"
    return f"{sample.prompt_tokens:,} tokens{cached}<br>{when}"


def _quantiles(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.quantile(values, np.linspace(0, 1, _CURVE_POINTS + 1)).clip(_SHORTEST_SECONDS)
    return result


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Round to six digits: more than a screen shows, and half the size of a float's text."""
    return [float(f"{value:.6g}") for value in values]


def _ticks(rates: list[float]) -> list[float]:
    """Return the rates to label, without those that would overlap their neighbour."""
    shown: list[float] = []
    for rate in rates:
        if not shown or rate >= shown[-1] * (max(rates) / min(rates)) ** (1 / 12):
            shown.append(rate)
    return shown


def _seconds_axis(low: float, high: float) -> dict[str, Any]:
    return log_axis(max(low, _SHORTEST_SECONDS), max(high, _SHORTEST_SECONDS), _seconds_name)


def _seconds_name(seconds: float) -> str:
    return setting(seconds)
