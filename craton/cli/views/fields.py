"""Titled lines of a command's output. rich is imported when the first line is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

TITLE_WIDTH = 11


def print_field(console: Console, title: str, text: str) -> None:
    """Print `title       text`; long text wraps within its column."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=TITLE_WIDTH, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(title, style="dim"), Text(text))
    console.print(grid)
