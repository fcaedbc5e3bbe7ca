"""The plots of a load test as plotly figures in plain dicts, without a library to draw them.

Colours are tokens ("@first", or "@first/40" for 40 % opaque) that the page resolves against its style sheet, so that
one figure serves light, dark and print. Every figure is thinned to what a screen can show, so that a page stays small
however long the load was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from craton.loadtest.benchmark import Level
from craton.loadtest.load import Open
from craton.loadtest.objectives import Objectives
from craton.loadtest.quantities import digits, duration
from craton.loadtest.samples import Sample
from craton.loadtest.summary import timeline

Figure = dict[str, Any]

FIRST, BETWEEN = "@first", "@between"  # time to first token, and between tokens
_CURVE_POINTS = 400
_SCATTER_POINTS = 2000
# Pieces that arrive together have no time between them; a logarithmic axis needs some.
_SHORTEST_SECONDS = 1e-5


def distribution_figure(samples: Sequence[Sample], objectives: Objectives | None) -> Figure:
    """Which share of first tokens and of gaps came within which time; objectives as dashed lines."""
    answered = [sample for sample in samples if not sample.error]
    firsts = np.array([sample.ttft_seconds for sample in answered])
    gaps = np.concatenate([sample.gap_seconds for sample in answered])
    layout = _layout(330)
    curves = [
        (name, _quantiles(values), color)
        for name, values, color in (("TTFT", firsts, FIRST), ("ITL", gaps, BETWEEN))
        if len(values)
    ]
    # The fastest hundredth, such as pieces that came together, would stretch the axis by decades.
    lowest = min(seconds[_CURVE_POINTS // 100] for _, seconds, _ in curves)
    highest = max(seconds[-1] for _, seconds, _ in curves)
    limits = dict(objectives.seconds) if objectives else {}
    marks = [(limits[name], color) for name, color in (("ttft", FIRST), ("itl", BETWEEN)) if name in limits]
    layout["xaxis"] |= _seconds_axis(min([lowest, *(at for at, _ in marks)]), max([highest, *(at for at, _ in marks)]))
    layout["yaxis"] |= {"range": [0, 103], "ticksuffix": " %", "nticks": 6}
    layout["shapes"] = [_vertical(at, color) for at, color in marks]
    layout["annotations"] = [_axis_name("share that came within")]
    for name, seconds, color in curves:
        layout["annotations"].append(_label(math.log10(seconds[len(seconds) // 2]), 50, name, color))
    shares = np.linspace(0, 100, _CURVE_POINTS + 1)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": _rounded(seconds),
            "y": _rounded(shares),
            "line": {"color": color, "width": 2.5},
            "hovertext": [f"{name} ≤ {duration(float(value))}" for value in seconds],
            "hovertemplate": "%{y:.1f} %<br>%{hovertext}<extra></extra>",
        }
        for name, seconds, color in curves
    ]
    return {"data": traces, "layout": layout}


def timeline_figure(samples: Sequence[Sample]) -> Figure:
    """Requests that run, and below them tokens that arrive, over the same time."""
    course = timeline(samples)
    layout = _layout(390)
    layout["xaxis"] |= {"title": _axis_title("seconds after the start"), "showgrid": False, "anchor": "y2"}
    layout["yaxis"] |= {"domain": [0.58, 1.0], "rangemode": "tozero", "nticks": 4}
    layout["yaxis2"] = layout["yaxis"] | {"domain": [0.0, 0.42], "tickformat": "~s"}
    layout["annotations"] = [_axis_name("running requests"), _axis_name("output tokens/s", 0.42)]
    area = {"type": "scatter", "mode": "lines", "x": _rounded(course.seconds), "fill": "tozeroy"}
    return {
        "data": [
            area
            | {
                "y": _rounded(course.running),
                "line": {"color": "@accent", "width": 1.5, "shape": "hvh"},
                "fillcolor": "@accent/20",
                "hovertemplate": "%{x:.1f} s<br>%{y:.1f} running<extra></extra>",
            },
            area
            | {
                "y": _rounded(course.tokens_per_second),
                "yaxis": "y2",
                "line": {"color": BETWEEN, "width": 1.5, "shape": "hvh"},
                "fillcolor": f"{BETWEEN}/20",
                "hovertemplate": "%{x:.1f} s<br>%{y:,.0f} tokens/s<extra></extra>",
            },
        ],
        "layout": layout,
    }


def prompt_figure(samples: Sequence[Sample]) -> Figure:
    """One point a request: the longer its prompt, the later its first token."""
    answered = [sample for sample in samples if not sample.error and sample.prompt_tokens is not None]
    points = answered[:: math.ceil(len(answered) / _SCATTER_POINTS)]
    firsts = [sample.ttft_seconds or 0.0 for sample in points]
    layout = _layout(330)
    layout["xaxis"] |= {"title": _axis_title("tokens of the prompt"), "showgrid": False, "nticks": 8}
    scale, unit = (1.0, "s") if max(firsts) >= 1 else (1e3, "ms")
    layout["yaxis"] |= {"rangemode": "tozero", "nticks": 6}
    layout["annotations"] = [_axis_name(f"TTFT, {unit}")]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [sample.prompt_tokens for sample in points],
        "y": _rounded([scale * seconds for seconds in firsts]),
        "marker": {"size": 6, "color": f"{FIRST}/55"},
        "cliponaxis": False,
        "hovertext": [_hover(sample) for sample in points],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def sweep_figure(levels: Sequence[Level]) -> Figure:
    """Throughput above and latencies below, over the rate that was asked for; hollow where it did not go well."""
    rates = [level.load.requests_per_second if isinstance(level.load, Open) else 0.0 for level in levels]
    layout = _layout(440)
    layout["xaxis"] |= {
        "type": "log",
        "title": _axis_title("requests/s asked for"),
        "tickvals": _ticks(rates),
        "ticktext": [digits(value) for value in _ticks(rates)],
        "range": _log_range(min(rates), max(rates)),
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
            known = [max(value, _SHORTEST_SECONDS) if value is not None else None for value in values]
            shown += [value for value in known if value is not None]
            traces.append(_curve(levels, rates, known, color, f"{name} {percentile}", "y2", dash))
    layout["yaxis2"] = layout["yaxis"] | {"domain": [0.0, 0.46]}
    layout["annotations"] = [_axis_name("output tokens/s"), _axis_name("TTFT and ITL: p50, dotted p99", 0.46)]
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


def _hover(sample: Sample) -> str:
    cached = f", {sample.cached_tokens:,} cached" if sample.cached_tokens else ""
    when = f"TTFT {duration(sample.ttft_seconds)}<br>due at {sample.due_seconds:.1f} s"
    return f"{sample.prompt_tokens:,} tokens{cached}<br>{when}"


def _quantiles(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.quantile(values, np.linspace(0, 1, _CURVE_POINTS + 1)).clip(_SHORTEST_SECONDS)
    return found


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Six digits, which is more than a screen shows and half of what a float takes to write."""
    return [float(f"{value:.6g}") for value in values]


def _ticks(rates: list[float]) -> list[float]:
    """The rates that were tried, less those that would print over their neighbour."""
    shown: list[float] = []
    for rate in rates:
        if not shown or rate >= shown[-1] * (max(rates) / min(rates)) ** (1 / 12):
            shown.append(rate)
    return shown


def _seconds_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis of durations with ticks at 1, 2 and 5, or at powers of ten where those would crowd."""
    low, high = max(low, _SHORTEST_SECONDS), max(high, _SHORTEST_SECONDS)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    names = [f"{tick:g} s" if tick >= 1 else f"{1e3 * tick:g} ms" for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": names, "range": _log_range(low, high)}


def _log_range(low: float, high: float) -> list[float]:
    """The exponents of a logarithmic axis with room for the outer marks."""
    room = max(0.06 * math.log10(high / low), 0.04) if high > low else 0.2
    return [math.log10(low) - room, math.log10(high) + room]


def _layout(height: int) -> dict[str, Any]:
    axis = {
        "fixedrange": True,
        "automargin": True,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "gridcolor": "@grid",
    }
    return {
        "height": height,
        "showlegend": False,
        "font": {"color": "@muted", "size": 12, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 14, "t": 36, "b": 42},
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "@ink", "bordercolor": "@ink", "font": {"color": "@surface"}, "align": "left"},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 10, "font": {"size": 12}}


def _axis_name(text: str, y: float = 1.0) -> dict[str, Any]:
    """The name of a vertical axis, lying above it: easier to read than on its side, and it costs no width."""
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": "paper",
        "y": y,
        "yshift": 20,
        "text": text,
        "showarrow": False,
        "font": {"color": "@muted", "size": 12},
    }


def _label(x: float, y: float, text: str, color: str) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "xanchor": "left",
        "xshift": 8,
        "text": f"<b>{text}</b>",
        "showarrow": False,
        "font": {"color": color, "size": 13},
        "bgcolor": "@surface",
    }


def _vertical(x: float, color: str) -> dict[str, Any]:
    line = {"color": color, "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
