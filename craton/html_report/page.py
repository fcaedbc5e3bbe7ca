"""An HTML page in one file: no network, no server, no fonts.

A content security policy forbids the page to load or send anything; everything except `Markup` is escaped. plotly and
the figures are in the file; the body must contain the figures' data too, so that the page is complete without
JavaScript. The body consists of tiles, warnings, sections with a finding as their title, and tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from craton.html_report.plots import Figure

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Markup(str):
    """Text that is already HTML; every other string is escaped on its way into the page."""


@dataclass(frozen=True)
class Tile:
    """One large number; the detail below it, such as its interval, is in normal text, the note is muted."""

    title: str
    value: str
    note: str
    detail: str = ""


def page_html(title: str, body: str, figures: Mapping[str, Figure], footer: str, style: str) -> str:
    """Return the page. A figure is drawn into the element of the body whose id is its name; `style` extends the common
    style sheet, for example with the colours of figures."""
    from plotly.offline import get_plotlyjs  # large, and needed only here

    package = files("craton.html_report")
    # Escaped as JSON, "<" cannot end the script element.
    data = json.dumps(figures, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{package.joinpath("page.css").read_text(encoding="utf-8")}{style}</style>
</head>
<body>
<main>
{markup(body)}
<footer>{markup(footer)}</footer>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{package.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def markup(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(escape(text))


def with_code(text: str) -> Markup:
    """Return escaped text with `commands` as code."""
    pieces = escape(text).split("`")
    return Markup("".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces)))


def tiles(shown: Iterable[Tile]) -> Markup:
    return Markup('<div class="tiles">' + "".join(map(_tile, shown)) + "</div>\n")


def warning_list(title: str, sentences: Sequence[str]) -> Markup:
    """Return a box of warnings about the page's content; empty without warnings."""
    if not sentences:
        return Markup()
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Markup(f'<div class="callout warning"><h2>{escape(title)}</h2><ul>{items}</ul></div>\n')


def section(name: str, finding: str, body: str) -> Markup:
    return Markup(f"<section><h2>{escape(name)}</h2><h3>{escape(finding)}</h3>{markup(body)}</section>\n")


def plot_section(name: str, finding: str, plot: str, beside: str = "", below: str = "") -> Markup:
    """Return a section around the figure named `plot`."""
    figure = f'<div class="plot" id="{plot}" role="img" aria-label="{escape(finding)}"></div>'
    body = f'<div class="pair">{figure}<div>{markup(beside)}</div></div>' if beside else figure
    return section(name, finding, Markup(body + markup(below)))


def absent_section(name: str, sentence: str, below: str = "") -> Markup:
    """Return a section with the reason why it has no content."""
    text = f'<p class="absent">{with_code(sentence)}</p>'
    return Markup(f"<section><h2>{escape(name)}</h2>{text}{markup(below)}</section>\n")


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], wide: bool = False) -> Markup:
    """Return a table of rows with their class. A column name starts with ">" for numbers, with "=" for names without
    line breaks; a wide table becomes cards on a phone."""
    names = [column.lstrip(">=") for column in columns]
    classes = [{">": "number", "=": "name"}.get(column[:1], "plain") for column in columns]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(classes, names, strict=True))
    lines = []
    for row_class, cells in rows:
        line = "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{markup(cell)}</td>'
            for kind, name, cell in zip(classes, names, cells, strict=True)
        )
        lines.append(f'<tr class="{row_class}">{line}</tr>')
    thead = f"<thead><tr>{head}</tr></thead>" if any(names) else ""
    return Markup(f'<table class="{"wide" if wide else ""}">{thead}<tbody>{"".join(lines)}</tbody></table>')


def chip(color: str, text: str) -> Markup:
    """Return text after a small square in the colour that it has in a plot; `color` is a token as in figures."""
    name, _, share = color.removeprefix("@").partition("/")
    background = f"color-mix(in srgb, var(--{name}) {share or 100}%, var(--surface))"
    return Markup(f'<span class="chip" style="background:{background}"></span>{escape(text)}')


def _tile(tile: Tile) -> str:
    detail = f'<div class="detail">{escape(tile.detail)}</div>' if tile.detail else ""
    return (
        f'<div class="tile"><div class="title">{escape(tile.title)}</div><div class="value">{escape(tile.value)}</div>'
        f'{detail}<div class="note">{escape(tile.note)}</div></div>'
    )
