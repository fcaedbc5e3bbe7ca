"""The console of the verbs: what runs and their files say is printed, never obeyed by the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from craton.printable import printable


class SafeConsole(Console):
    """A rich console that writes out control characters. rich itself passes the escape character of a text on."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or text.isprintable():
                yield segment
            else:
                yield Segment(printable(text), style)
