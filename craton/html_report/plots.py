"""Common parts of plotly figures as plain dicts, without a plotting library.

Colours are tokens that the page resolves against its style sheet, so that one figure works in light mode, dark mode and
print: "@accent" is the variable --accent, "@accent/60" 60% of it over the surface, "@accent~60" the same with 60%
opacity. Only the values of keys that end in "color" are tokens. Callers must escape user text in figures: plotly
interprets tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Figure = dict[str, Any]


def plain_layout(height: int, left: int = 44) -> dict[str, Any]:
    """Return a base layout, in pixels; the left margin is wider than `left` if ticks need it."""
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
        "margin": {"l": left, "r": 14, "t": 36, "b": 42},
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "@ink", "bordercolor": "@ink", "font": {"color": "@surface"}, "align": "left"},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }


def axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 10, "font": {"size": 12}}


def axis_name(text: str, y: float = 1.0) -> dict[str, Any]:
    """Return the name of a vertical axis, placed above it: easier to read than rotated, and without extra width."""
    return label(0, y, text, "left", yshift=20) | {"xref": "paper"}


def log_axis(low: float, high: float, name: Callable[[float], str]) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at 1, 2 and 5, or at powers of ten if those would overlap."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [name(tick) for tick in ticks],
        "range": log_range(low, high),
    }


def log_range(low: float, high: float) -> list[float]:
    """Return the exponents of a logarithmic axis, with a margin for the outer markers."""
    room = max(0.06 * math.log10(high / low), 0.04) if high > low else 0.2
    return [math.log10(low) - room, math.log10(high) + room]


def label(
    x: float, y: float, text: str, anchor: str, yref: str = "paper", yshift: float = 0.0, xshift: float = 0.0
) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "yref": yref,
        "xanchor": anchor,
        "xshift": xshift,
        "yshift": yshift,
        "text": text,
        "showarrow": False,
        "font": {"color": "@muted", "size": 12},
        "bgcolor": "@surface",
    }


def vertical_line(x: float, color: str, dash: str = "dot") -> dict[str, Any]:
    """Return a line over the whole height of the plot."""
    line = {"color": color, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
