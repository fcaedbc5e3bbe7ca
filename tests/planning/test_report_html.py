"""The HTML report: complete, escaped, offline, and right in a real browser at the width of a phone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from html import unescape
from pathlib import Path

from html_pages import HOSTILE, Reader, check_in_browser, needs_browser

from craton.planning import Plan
from craton.planning.report import plan_html

ALL_PLOTS = ["plot-step", "plot-memory", "plot-front", "plot-scaling", "plot-goodput", "plot-sensitivity"]


def test_small_plan_has_every_plot_and_its_numbers(small_plan: Plan) -> None:
    reader = Reader(plan_html(small_plan))
    assert reader.plots == [
        "plot-step",
        "plot-memory",
        "plot-front",
        "plot-scaling",
        "plot-goodput",
        "plot-sensitivity",
    ]
    for shown in ("7.83 s", "7.21–8.52 s", "10d 20h", "$207k", "1.07M tokens/s", "45% MFU", "105 GiB"):
        assert shown in reader.text
    for each in small_plan.alternatives + small_plan.front:
        assert each.reason in reader.text
    assert small_plan.runner_up is not None
    assert f"On other hardware, {small_plan.runner_up.cluster}" in reader.text


def test_missing_pieces_are_said_in_a_line(unfit_plan: Plan) -> None:
    reader = Reader(plan_html(unfit_plan))
    assert reader.plots == ["plot-step", "plot-memory"]
    assert "does not fit" in reader.text
    for sentence in (
        "No other layout was evaluated",
        "No other clusters were searched",
        "No other number of GPUs was evaluated",
        "there is no interval to choose",
        "No input was varied",
        "no price known for dgx-h100",
    ):
        assert sentence in reader.text


def test_front_without_prices_keeps_its_table(small_plan: Plan) -> None:
    unpriced = [replace(each, cost_dollars=None) for each in small_plan.front]
    reader = Reader(plan_html(replace(small_plan, front=unpriced, cost=None)))
    assert "plot-front" not in reader.plots
    assert "No price is known for any of these clusters" in reader.text
    assert "p6-b200.48xlarge x 64" in reader.text


def test_end_day_needs_a_start(giant_plan: Plan) -> None:
    assert "20 Feb 2027" in Reader(plan_html(giant_plan, date(2026, 11, 20))).text
    assert "if started" not in Reader(plan_html(giant_plan)).text


def test_hostile_text_stays_text(small_plan: Plan) -> None:
    page = plan_html(with_words(small_plan, HOSTILE))
    reader = Reader(page)
    assert reader.tags == Reader(plan_html(with_words(small_plan, "harmless"))).tags
    assert HOSTILE in reader.text
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert figures is not None
    # In a figure the name is escaped once more, because plotly reads tags.
    hover = json.dumps(json.loads(figures[1]))
    assert "<script" not in hover
    assert "<img" not in hover
    assert "<img" in unescape(hover)


def test_nothing_is_loaded_from_elsewhere(small_plan: Plan) -> None:
    page = plan_html(small_plan)
    assert len(page.encode()) < 6e6
    assert page.count("plotly.js v") == 1
    assert Reader(page).links == []
    assert "default-src 'none'" in page


@needs_browser
def test_in_a_browser(small_plan: Plan, giant_plan: Plan, tmp_path: Path) -> None:
    pages = {
        "desk": (plan_html(with_words(small_plan, HOSTILE), date(2026, 11, 20)), 1200),
        "phone": (plan_html(giant_plan, date(2026, 11, 20)), 400),
    }
    # Turned from a desk to a phone, the page reflows and its plots are drawn again.
    assert check_in_browser(pages, tmp_path, turned=("desk",)) == {
        "desk": ALL_PLOTS,
        "phone": [name for name in ALL_PLOTS if name not in ("plot-front", "plot-scaling")],
    }


def with_words(plan: Plan, words: str) -> Plan:
    """The plan with every text that a user or a catalog could supply replaced."""
    return replace(
        plan,
        job=words,
        profile=words,
        warnings=[words],
        model=replace(plan.model, name=words),
        cluster=replace(plan.cluster, name=words),
        bottleneck=replace(plan.bottleneck, part=words, text=words, relief=words),
        alternatives=[replace(each, reason=words) for each in plan.alternatives],
        front=[replace(each, cluster=words, reason=words) for each in plan.front],
        sensitivities=[replace(each, name=words) for each in plan.sensitivities],
        memory_parts={words if name == "logits" else name: size for name, size in plan.memory_parts.items()},
        memory_instants={f"{words} {name}": size for name, size in plan.memory_instants.items()},
        parts={phase: {f"{words} {name}": s for name, s in parts.items()} for phase, parts in plan.parts.items()},
    )
