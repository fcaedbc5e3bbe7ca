"""What stands in the body of a page: tiles, warnings, sections with a finding as their title, tables.

Every text is escaped here; what is HTML already comes as `Markup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from craton.html_report.markup import Markup, markup, with_code


@dataclass(frozen=True)
class Tile:
    """One number to see from afar; the detail below it, such as its interval, is in plain ink, the note is muted."""

    title: str
    value: str
    note: str
    detail: str = ""


def tiles(shown: Iterable[Tile]) -> Markup:
    return Markup('<div class="tiles">' + "".join(map(_tile, shown)) + "</div>\n")


def warning_list(title: str, sentences: Sequence[str]) -> Markup:
    """What to know before believing the page; nothing where there is nothing to say."""
    if not sentences:
        return Markup()
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Markup(f'<div class="callout warning"><h2>{escape(title)}</h2><ul>{items}</ul></div>\n')


def section(name: str, finding: str, body: str) -> Markup:
    return Markup(f"<section><h2>{escape(name)}</h2><h3>{escape(finding)}</h3>{markup(body)}</section>\n")


def plot_section(name: str, finding: str, plot: str, beside: str = "", below: str = "") -> Markup:
    """A section around the figure called `plot`."""
    figure = f'<div class="plot" id="{plot}" role="img" aria-label="{escape(finding)}"></div>'
    body = f'<div class="pair">{figure}<div>{markup(beside)}</div></div>' if beside else figure
    return section(name, finding, Markup(body + markup(below)))


def absent_section(name: str, sentence: str, below: str = "") -> Markup:
    """A section that says why it has nothing to show."""
    text = f'<p class="absent">{with_code(sentence)}</p>'
    return Markup(f"<section><h2>{escape(name)}</h2>{text}{markup(below)}</section>\n")


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], wide: bool = False) -> Markup:
    """Rows with their class; a column is of numbers after ">", of unbroken names after "="; a wide table becomes
    cards on a phone."""
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
    """Text after a small square in the colour of what it names in a plot: a token as figures have it."""
    name, _, share = color.removeprefix("@").partition("/")
    background = f"color-mix(in srgb, var(--{name}) {share or 100}%, var(--surface))"
    return Markup(f'<span class="chip" style="background:{background}"></span>{escape(text)}')


def _tile(tile: Tile) -> str:
    detail = f'<div class="detail">{escape(tile.detail)}</div>' if tile.detail else ""
    return (
        f'<div class="tile"><div class="title">{escape(tile.title)}</div><div class="value">{escape(tile.value)}</div>'
        f'{detail}<div class="note">{escape(tile.note)}</div></div>'
    )
