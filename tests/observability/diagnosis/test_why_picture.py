"""The README's picture of `craton why` shows what it says now; `--update-golden` draws it again."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from sick import cases

from craton.observability.diagnosis import diagnose

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "why.svg"


def drawn() -> str:
    snapshot = next(case.snapshot for case in cases() if case.name == "heat")
    verdict = diagnose(snapshot)
    console = Console(record=True, width=88, file=io.StringIO())
    console.print(Text(f"$ craton why {snapshot.run.name}", style="bold green"))
    console.print(Text(verdict.sentence))
    for line in verdict.evidence:
        console.print(Text(f"  · {line}", style="cyan"))
    svg = console.export_svg(title=f"craton why {snapshot.run.name}", unique_id="why")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture in a repository loads no fonts
    return svg.replace("Fira Code", "ui-monospace")


def words_of(svg: str) -> list[str]:
    return unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))).replace("\xa0", " ").split()


def test_the_picture_shows_what_why_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PICTURE.write_text(drawn(), encoding="utf-8")
    shown = words_of(PICTURE.read_text(encoding="utf-8"))
    assert "throttled" in shown
    assert shown == words_of(drawn())
