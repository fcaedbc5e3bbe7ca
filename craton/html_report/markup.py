"""What is HTML and what is text: only what says that it is HTML gets into a page as it is."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is already HTML; every other string is escaped on its way into the page."""


def markup(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(escape(text))


def with_code(text: str) -> Markup:
    """Escaped text in which `commands` stand in the font of code."""
    pieces = escape(text).split("`")
    return Markup("".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces)))
