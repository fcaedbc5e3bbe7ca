"""The common page: whole in one file, safe from any text, and its plots in the colours of its style sheet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from html_pages import HOSTILE, Reader, needs_browser, open_in_browser

from craton.html_report import (
    Figure,
    Markup,
    Tile,
    absent_section,
    chip,
    log_axis,
    page_html,
    plain_layout,
    plot_section,
    section,
    table,
    tiles,
    warning_list,
)


def page_of_everything(words: str) -> str:
    """A page with `words` wherever it takes text."""
    body = (
        tiles([Tile(words, words, words, words), Tile(words, words, words)])
        + warning_list(words, [words])
        + section(words, words, words)
        + plot_section(words, words, "plot-words", beside=words, below=words)
        + absent_section(words, words, words)
        + table([words, ">" + words], [("", [words, chip("@accent", words)])])
    )
    return page_html(words, Markup(body), {"plot-words": {"data": [{"text": words}]}}, words, "")


def test_text_stays_text_wherever_it_stands() -> None:
    hostile, harmless = Reader(page_of_everything(HOSTILE)), Reader(page_of_everything("harmless"))
    assert hostile.tags == harmless.tags
    assert hostile.text.count(HOSTILE) == harmless.text.count("harmless") == 24
    assert hostile.links == []


def test_figures_come_back_as_they_were() -> None:
    figure = {"data": [{"text": HOSTILE}], "layout": {}}
    written = page_html("", "", {"plot": figure}, "", "")
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', written, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == {"plot": figure}


def test_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        page_html("", "", {"plot": {"data": [{"x": [float("nan")]}]}}, "", "")


def test_own_rules_come_after_the_common_ones() -> None:
    style = re.search(r"<style>(.*?)</style>", page_html("", "", {}, "", "h1 { color: red; }"), re.DOTALL)
    assert style is not None
    assert style[1].endswith("h1 { color: red; }")
    assert "--accent:" in style[1]


def test_commands_stand_in_the_font_of_code() -> None:
    assert "<code>--a &lt;b&gt;</code> compares" in absent_section("name", "`--a <b>` compares")


def test_a_table_knows_numbers_names_and_words() -> None:
    made = table([">GPUs", "=cluster", "why"], [("chosen", ["8", "p5 x 1", "cheap"])], wide=True)
    assert '<tr class="chosen"><td class="number" data-label="GPUs">8</td>' in made
    assert '<td class="name" data-label="cluster">p5 x 1</td><td class="plain" data-label="why">cheap</td>' in made
    assert "<thead>" not in table(["=", ""], [("", ["batch", "8"])])


def test_a_logarithmic_axis_has_room_and_ticks_that_do_not_crowd() -> None:
    axis = log_axis(2, 300, str)
    assert axis["ticktext"][:4] == ["1.0", "2.0", "5.0", "10.0"]
    assert 10 ** axis["range"][0] < 2
    assert 10 ** axis["range"][1] > 300
    assert log_axis(1, 1e6, str)["tickvals"] == [10.0**power for power in range(7)]


@needs_browser
def test_tokens_become_colours_and_other_texts_do_not(tmp_path: Path) -> None:
    colors = ["@ink", "@ink/50", "@ink~40", "#123456"]
    figure: Figure = {
        "data": [{"type": "scatter", "mode": "markers", "x": [1, 2, 3, 4], "y": [1, 1, 1, 1]}],
        "layout": plain_layout(200) | {"annotations": [{"x": 1, "y": 1, "text": "@ink"}]},
    }
    figure["data"][0]["marker"] = {"color": colors}
    made = page_html(
        "colours", plot_section("name", "finding", "plot"), {"plot": figure}, "", ":root { --ink: #ff0000; }"
    )
    view = open_in_browser({"colours": (made, 400)}, tmp_path)["colours"]
    assert view["errors"] == []
    assert view["plots"][0]["fills"] == [
        ["rgb(255, 0, 0)", 1],
        ["rgb(255, 128, 128)", 1],
        ["rgb(255, 0, 0)", 0.4],
        ["rgb(18, 52, 86)", 1],
    ]
    assert "@ink" in view["plots"][0]["words"]
