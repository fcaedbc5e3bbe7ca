"""The result of a sweep for people: a table in the terminal, and a page with the curves and the final numbers by value.

The page is one file that loads nothing. Every text is escaped, and every number of the plots is in its table.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from craton import formatting, html_report
from craton.html_report import Figure, Markup, axis_name, axis_title, plain_layout
from craton.orchestration.members.result import (
    METRICS,
    SWEEP_FILE,
    SWEEP_PAGE,
    SweepResult,
    SweepRow,
    read_sweep,
    sweep_json,
)
from craton.printable import printable_line
from craton.telemetry import RunDirectory
from craton.telemetry.files import replace_text

if TYPE_CHECKING:
    from rich.table import Table

MAX_TERMINAL_ROWS = 40  # the others are in sweep.json and on the page
NUM_COLORS = 8
MAX_VALUE_PLOTS = 4
TABLE_WIDTH = 120  # characters, where there is no terminal
_STYLES = {"done": "bold green", "failed": "bold red", "lost": "bold red", "unreadable": "bold red", "running": "green"}


def sweep_table(sweep: SweepResult) -> Table:
    """Return the table of a sweep, best member first; columns that no member has are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    columns = _columns(sweep)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in columns:
        is_word = title in ("MEMBER", "STATE", "REASON")
        table.add_column(title, justify="left" if is_word else "right", no_wrap=title != "REASON")
    best = sweep.best
    for row in sweep.ranked[:MAX_TERMINAL_ROWS]:
        cells = [Text(cell) for cell in _cells(sweep, row, columns)]
        cells[1].stylize(_STYLES.get(row.state, ""))
        if row is best:
            cells[0].stylize("bold")
        table.add_row(*cells)
    return table


def sweep_table_text(sweep: SweepResult, width: int = TABLE_WIDTH) -> str:
    """Return the table as plain text, with the best member below it."""
    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, width=width, color_system=None, highlight=False)
    console.print(sweep_table(sweep))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    left_out = len(sweep.rows) - MAX_TERMINAL_ROWS
    if left_out > 0:
        lines.append(f"and {formatting.counted(left_out, 'more member')}, in sweep.json and sweep.html")
    return "\n".join([*lines, "", sweep_verdict(sweep)])


def sweep_verdict(sweep: SweepResult) -> str:
    """Return the result in one sentence."""
    best, metric = sweep.best, sweep.metric
    if best is not None:
        values = ", ".join(f"{key} {value_text(value)}" for key, value in best.values.items())
        return f"best: {best.name} with the {_extreme(sweep)}, {metric.text(best)} ({printable_line(values)})"
    if not sweep.rows:
        return "the sweep has no members"
    if any(row.state == "done" for row in sweep.rows):
        return f"no best member: none of those that are done has a finite {metric.words}"
    return "no best member: none is done"


def sweep_plot_html(sweep: SweepResult) -> str:
    """Return the page of a sweep."""
    figures: dict[str, Figure] = {}
    body = _header(sweep) + _tiles(sweep) + _curves(sweep, figures) + _by_value(sweep, figures) + _members(sweep)
    style = files(__package__).joinpath("sweep_report.css").read_text(encoding="utf-8")
    footer = Markup("The same numbers as JSON: <code>sweep.json</code> beside this page.")
    return html_report.page_html(f"{sweep.name}: sweep", Markup(body), figures, footer, style)


def write_sweep(run: RunDirectory) -> SweepResult:
    """Write the result and its page into the directory of the run that owns the sweep."""
    sweep = read_sweep(run)
    replace_text(run.path / SWEEP_FILE, json.dumps(sweep_json(sweep), indent=1, allow_nan=False) + "\n")
    replace_text(run.path / SWEEP_PAGE, sweep_plot_html(sweep))
    return sweep


def value_text(value: object) -> str:
    """Return a value as short as a reader needs it: the name of a model, the end of a path."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, Mapping):
        return str(value.get("name") or json.dumps(value))
    if isinstance(value, list):
        return json.dumps(value)
    text = str(value)
    return text.rstrip("/").rpartition("/")[2] if text.startswith("/") else text


def _columns(sweep: SweepResult) -> list[str]:
    metrics = {metric.title: any(metric.of(row) is not None for row in sweep.rows) for metric in METRICS}
    wanted = {
        **metrics,
        "LOSS": True,
        "$": any(row.dollars is not None for row in sweep.rows),
        "REASON": any(row.message for row in sweep.rows),
    }
    titles = (
        "MEMBER",
        "STATE",
        "STEP",
        *(metric.title for metric in reversed(METRICS)),
        "TOK/S",
        "TIME",
        "$",
        "REASON",
    )
    return [title for title in titles if wanted.get(title, True)]


def _cells(sweep: SweepResult, row: SweepRow, columns: list[str]) -> list[str]:
    of = f"/{row.steps:,}" if row.steps else ""
    mark = "★ " if row is sweep.best else "  "
    texts = {
        "MEMBER": f"{mark}{printable_line(row.name)}",
        "STATE": row.state,
        "STEP": f"{row.step:,}{of}",
        **{metric.title: metric.text(row) for metric in METRICS},
        "TOK/S": formatting.amount(row.tokens_per_second),
        "TIME": formatting.whole_duration(row.seconds),
        "$": formatting.dollars(row.dollars),
        "REASON": printable_line(row.message),
    }
    return [texts[title] for title in columns]


def _header(sweep: SweepResult) -> Markup:
    keys = ", ".join(sweep.keys) or "no keys"
    return Markup(
        f'<header><div class="eyebrow">Craton sweep</div><h1>{escape(sweep.name)}</h1>'
        f'<p class="verdict">{escape(sweep_verdict(sweep).capitalize())}.</p>'
        f'<p class="facts">Swept: {escape(keys)}</p></header>\n'
    )


def _tiles(sweep: SweepResult) -> Markup:
    states = Counter(row.state for row in sweep.rows)
    others = ", ".join(f"{number:,} {state}" for state, number in states.items() if state != "done")
    best, metric = sweep.best, sweep.metric
    seconds = sum(row.seconds or 0.0 for row in sweep.rows)
    dollars = [row.dollars for row in sweep.rows if row.dollars is not None]
    return html_report.tiles(
        [
            html_report.Tile("Members done", f"{states['done']:,} of {len(sweep.rows):,}", others or "all of them"),
            html_report.Tile(
                f"Best {metric.words}", metric.text(best) if best else "–", best.name if best else "none yet"
            ),
            html_report.Tile(
                "Run time",
                formatting.whole_duration(seconds or None),
                "of all members together" + (f"; {formatting.dollars(sum(dollars))}" if dollars else ""),
            ),
        ]
    )


def _curves(sweep: SweepResult, figures: dict[str, Figure]) -> Markup:
    what = sweep.curve_words
    drawn = [row for row in sweep.rows if any(value is not None for value in _values_of(sweep, row))]
    if not drawn:
        return html_report.absent_section("Loss", "No member has recorded a loss yet.")
    key, colors = _colors(sweep)
    traces = [
        _trace(sweep, [row for row in drawn if _color(row, key, colors) == color], color)
        for color in dict.fromkeys(_color(row, key, colors) for row in drawn)
    ]
    best = sweep.best
    if best is not None and best in drawn:
        traces.append(_trace(sweep, [best], _color(best, key, colors), width=3.5))
    layout = plain_layout(400)
    layout["xaxis"] |= {"title": axis_title("tokens trained on"), "rangemode": "tozero", "exponentformat": "SI"}
    if what == "loss":
        layout["yaxis"] |= {"range": _loss_range(sweep, drawn)}
    layout["annotations"] = [axis_name(what)]
    figures["curves"] = {"data": traces, "layout": layout}
    count = formatting.counted(len(drawn), "member")
    finding = f"{count}; the best is drawn thick" if best is not None and best in drawn else count
    return html_report.plot_section(f"{what.capitalize()} over tokens", finding, "curves", below=_legend(key, colors))


def _trace(sweep: SweepResult, rows: list[SweepRow], color: str, width: float = 1.5) -> dict[str, Any]:
    """Return the curves of several members as one trace, with a gap after each: a browser draws a thousand of them."""
    x: list[float | None] = []
    y: list[float | None] = []
    names: list[str] = []
    for row in rows:
        curve = sweep.curves[row.name]
        x += [*curve.tokens, None]
        y += [*curve.values, None]
        names += [escape(row.name)] * (len(curve.tokens) + 1)
    return {
        "type": "scatter",
        "mode": "lines+markers" if sum(value is not None for value in y) <= 4 * len(rows) else "lines",
        "x": x,
        "y": y,
        "text": names,
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 6},
        "opacity": 1.0 if len(sweep.rows) <= 50 else 0.6,
        "hovertemplate": f"%{{text}}<br>{sweep.curve_words} %{{y:.4g}} at %{{x:.3s}} tokens<extra></extra>",
    }


def _by_value(sweep: SweepResult, figures: dict[str, Figure]) -> Markup:
    """Return a plot of the final numbers for each key with several values."""
    metric = sweep.metric
    ended = [row for row in sweep.rows if row.state == "done" and metric.order(row) < float("inf")]
    keys = [key for key in sweep.keys if len({value_text(row.values.get(key)) for row in ended}) > 1]
    sections = Markup()
    for number, key in enumerate(keys[:MAX_VALUE_PLOTS]):
        figures[name := f"value-{number}"] = _value_figure(sweep, ended, key)
        best = min((row for row in ended if key in row.values), key=metric.order)
        finding = f"the {_extreme(sweep)} is at {value_text(best.values[key])}"
        below = _legend(*_colors(sweep, key))
        sections = Markup(
            sections + html_report.plot_section(f"Final {metric.words} by {key}", finding, name, below=below)
        )
    return sections


def _value_figure(sweep: SweepResult, rows: list[SweepRow], key: str) -> Figure:
    """Return a point for each member over the values of a key, and a line through the best member at each value. A
    member that diverged is a triangle at the upper edge."""
    given = [row for row in rows if key in row.values]
    values = sorted({_order(row.values[key]) for row in given})
    texts = [text for *_, text in values]
    metric = sweep.metric
    best = {text: min((r for r in given if value_text(r.values[key]) == text), key=metric.order) for text in texts}
    ceiling = _ceiling(sweep)
    color_key, colors = _colors(sweep, key)
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [value_text(row.values[key]) for row in given],
        "y": [min(_score(sweep, row), ceiling) for row in given],
        "text": [f"{escape(row.name)}<br>{metric.text(row)}" for row in given],
        "marker": {
            "color": [_color(row, color_key, colors) for row in given],
            "symbol": ["circle" if _score(sweep, row) <= ceiling else "triangle-up" for row in given],
            "size": 10,
        },
        "hovertemplate": "%{text}<extra></extra>",
        "cliponaxis": False,
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": texts,
        "y": [min(_score(sweep, best[text]), ceiling) for text in texts],
        "line": {"color": "@muted/60", "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
    }
    layout = plain_layout(280)
    layout["xaxis"] |= {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": texts,
        "ticktext": [escape(text) for text in texts],
        "tickvals": texts,
        "title": axis_title(escape(key)),
        "nticks": 20,
    }
    if len(texts) > 20:
        shown = [texts[round(index * (len(texts) - 1) / 11)] for index in range(12)]
        layout["xaxis"] |= {"tickvals": shown, "ticktext": [escape(text) for text in shown]}
    layout["annotations"] = [axis_name(metric.words)]
    return {"data": [line, points], "layout": layout}


def _members(sweep: SweepResult) -> Markup:
    columns = _columns(sweep)
    names = [
        ("=" if title in ("MEMBER", "STATE") else "" if title == "REASON" else ">") + title.capitalize()
        for title in columns
    ]
    rows = []
    for row in sweep.ranked:
        kind = "chosen" if row is sweep.best else "failed" if row.state in ("failed", "lost", "unreadable") else ""
        rows.append((kind or ("" if row.state == "done" else "idle"), _cells(sweep, row, columns)))
    states = Counter(row.state for row in sweep.rows)
    finding = ", ".join(f"{number:,} {state}" for state, number in states.items()) or "none"
    return html_report.section("Members", finding, html_report.table(names, rows, wide=True))


def _legend(key: str | None, colors: Mapping[str, str]) -> Markup:
    if key is None or len(colors) < 2:
        return Markup()
    items = list(colors.items())
    if len(items) > NUM_COLORS:
        items = [items[0], items[len(items) // 2], items[-1]]
    chips = "".join(f"<span>{html_report.chip(color, text)}</span>" for text, color in items)
    return Markup(f'<p class="legend"><span>{escape(key)}</span>{chips}</p>')


def _colors(sweep: SweepResult, without: str = "") -> tuple[str | None, dict[str, str]]:
    """Return the key that colours tell apart, and the colour of each of its values: the first key with several values,
    but not too many for their own colours, else a scale of one colour."""
    by_key = {
        key: [text for *_, text in sorted({_order(row.values[key]) for row in sweep.rows if key in row.values})]
        for key in sweep.keys
        if key != without
    }
    several = sorted((key for key in by_key if len(by_key[key]) > 1), key=lambda key: len(by_key[key]) > NUM_COLORS)
    if not several:
        return None, {}
    texts = by_key[several[0]]
    if len(texts) <= NUM_COLORS:
        return several[0], {text: f"@value-{number}" for number, text in enumerate(texts, start=1)}
    shares = (25 + round(75 * place / (len(texts) - 1)) for place in range(len(texts)))
    return several[0], {text: f"@value-1/{share}" for text, share in zip(texts, shares, strict=True)}


def _color(row: SweepRow, key: str | None, colors: Mapping[str, str]) -> str:
    return "@value-1" if key is None else colors.get(value_text(row.values.get(key)), "@muted")


def _order(value: object) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size, before texts."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, value_text(value)  # type: ignore[arg-type]


def _loss_range(sweep: SweepResult, rows: list[SweepRow]) -> list[float]:
    """Return the range of the axis: from the lowest loss to the highest first one, so that members which diverge leave
    the plot instead of flattening it."""
    curves = [[loss for loss in _values_of(sweep, row) if loss is not None] for row in rows]
    low, high = min(map(min, curves)), max(curve[0] for curve in curves)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def _ceiling(sweep: SweepResult) -> float:
    """Return the highest loss at the beginning of a member: above it a member has learnt nothing. Infinite where
    higher numbers are better."""
    if sweep.metric.is_better_if_higher:
        return float("inf")
    first = [next((loss for loss in curve.values if loss is not None), None) for curve in sweep.curves.values()]
    return max((loss for loss in first if loss is not None), default=float("inf"))


def _values_of(sweep: SweepResult, row: SweepRow) -> tuple[float | None, ...]:
    curve = sweep.curves.get(row.name)
    return curve.values if curve else ()


def _extreme(sweep: SweepResult) -> str:
    """Return what the best member has: the lowest loss, or the highest reward."""
    return f"{'highest' if sweep.metric.is_better_if_higher else 'lowest'} {sweep.metric.words}"


def _score(sweep: SweepResult, row: SweepRow) -> float:
    score = sweep.metric.of(row)
    assert score is not None
    return score
