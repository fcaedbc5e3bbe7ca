"""The report: a terminal of 80 columns, JSON, and a page that is complete, escaped, offline and right in a browser."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import HOSTILE, Reader, check_in_browser, needs_browser
from rich.console import Console

from craton.bench.load import (
    Closed,
    Limit,
    LoadSettings,
    LoadTarget,
    LoadWorkload,
    Open,
    Prefixes,
    Sweep,
    parse_objectives,
)
from craton.bench.load.benchmark import Level, Report
from craton.bench.load.lengths import Lengths
from craton.bench.load.report import print_report, report_page
from craton.bench.load.samples import RequestSample
from craton.bench.load.saturation import Saturation
from craton.bench.load.summary import summarize

OBJECTIVES = parse_objectives("ttft=500ms,itl=50ms")


def samples(rate: float, number: int = 300, seed: int = 0) -> list[RequestSample]:
    """As a server would answer that gets slower with the rate and with the prompt."""
    generator = np.random.default_rng(seed)
    made = []
    for due in islice(Open(rate).times(seed, 0), number):
        prompt = int(generator.integers(100, 1024))
        first = due + 0.05 + prompt * 2e-4 * (1 + rate / 8) * generator.gamma(4, 0.25)
        times = first + np.concatenate([[0.0], np.cumsum(generator.gamma(8, 0.0025, 60))])
        made.append(RequestSample(due, due + 2e-4, float(times[-1]), times, prompt, 61, prompt // 4, has_usage=True))
    return made


def level(load: Closed | Open, made: list[RequestSample], trouble: str = "") -> Level:
    return Level(load, tuple(made), summarize(made, OBJECTIVES), 0.12, trouble)


def report(load: Closed | Open | Sweep, *levels: Level, found: Saturation | None = None, **changed: Any) -> Report:
    workload = LoadWorkload(Lengths("uniform", 100, 1024), Lengths("fixed", 61), Prefixes(64, 4, 0.5))
    settings = LoadSettings(LoadTarget("http://localhost:8000"), workload, load, Limit(requests=300), 0, 4, OBJECTIVES)
    made = Report(
        settings, "llama-8b", "random token ids below 32,000", levels, found, (), datetime(2026, 1, 2, tzinfo=UTC)
    )
    return replace(made, **changed)


@pytest.fixture(scope="module")
def single() -> Report:
    made = samples(4)
    made += [RequestSample(due, due, due + 1, error="HTTP 429", error_detail="come back later") for due in (1.0, 2.0)]
    return report(Open(4), level(Open(4), made), notes=("something to know",))


@pytest.fixture(scope="module")
def swept() -> Report:
    rates = (1.0, 2.0, 4.0, 5.66, 8.0)
    levels = [level(Open(rate), samples(rate, 150), "backlog" if rate > 5 else "") for rate in rates]
    return report(Sweep(1, 64), *levels, found=Saturation(4.0, 5.66))


def printed(shown: Report, width: int = 80) -> str:
    written = io.StringIO()
    print_report(shown, Console(file=written, width=width))
    return written.getvalue()


def test_the_terminal_says_everything_in_eighty_columns(single: Report, swept: Report) -> None:
    text = printed(single)
    for words in (
        "TTFT",
        "ITL",
        "TPOT",
        "end to end",
        "p50",
        "p95",
        "p99",
        "mean",
        "goodput",
        "cached",
        "302 answered",
    ):
        assert words in text
    assert "2 × HTTP 429: come back later" in text
    assert "Latencies count from when a request was due" in text
    assert "note: something to know" in text
    for each in (text, printed(swept)):
        assert max(map(len, each.split("\n"))) <= 80
    rows = [line for line in printed(swept).split("\n") if re.match(r"\s*(1|2|4|5|8)\.\d\d ", line)]
    assert len(rows) == 5
    assert "backlog" in rows[-1]
    assert "Saturated between 4.00 and 5.66 requests/s." in printed(swept)


def test_saturation_outside_of_a_sweep_is_said(swept: Report) -> None:
    assert "Saturated below 1.00 requests/s" in printed(replace(swept, saturation=Saturation(None, 1.0)))
    assert "Not saturated: the server sustains 8.00" in printed(replace(swept, saturation=Saturation(8.0, None)))


def test_json_has_every_number(single: Report, swept: Report) -> None:
    document = json.loads(json.dumps(single.to_json(), allow_nan=False))
    summary = document["summary"]
    assert set(summary["ttft_seconds"]) == {"mean", "p50", "p95", "p99"}
    assert summary["failures"] == [{"kind": "HTTP 429", "count": 2, "example": "come back later"}]
    assert document["objectives_seconds"] == {"ttft": 0.5, "itl": 0.05}
    assert document["latencies_from"] == "the moment a request was due"
    document = json.loads(json.dumps(swept.to_json(), allow_nan=False))
    assert [entry["requests_per_second"] for entry in document["levels"]] == [1, 2, 4, 5.66, 8]
    assert document["summary"] == document["levels"][2]["summary"]


def test_a_page_has_every_plot_and_its_numbers(single: Report, swept: Report) -> None:
    reader = Reader(report_page(single))
    assert reader.plots == ["plot-latency", "plot-timeline", "plot-prompt"]
    for words in (
        "llama-8b",
        "something to know",
        "2 of 302 requests failed",
        "come back later",
        "Inter-token latency",
    ):
        assert words in reader.text
    assert Reader(report_page(swept)).plots == ["plot-sweep", "plot-latency", "plot-timeline", "plot-prompt"]


def test_what_cannot_be_plotted_is_said_in_a_line() -> None:
    same = [replace(each, prompt_tokens=512) for each in samples(4, 20)]
    reader = Reader(report_page(report(Closed(2), level(Closed(2), same))))
    assert reader.plots == ["plot-latency", "plot-timeline"]
    assert "All prompts have 512 tokens" in reader.text
    broken = [RequestSample(0.0, 0.0, 1.0, error="timeout")]
    reader = Reader(report_page(report(Closed(2), level(Closed(2), broken))))
    assert reader.plots == []
    assert "None of 1 requests was answered" in reader.text


def test_answers_of_one_token_have_no_gaps_to_plot() -> None:
    single_tokens = [replace(each, chunk_seconds=each.chunk_seconds[:1], output_tokens=1) for each in samples(4, 20)]
    shown = report(Closed(2), level(Closed(2), single_tokens))
    assert "plot-latency" in Reader(report_page(shown)).plots
    assert re.search(r"ITL +– +– +– +–", printed(shown))


def hostile(shown: Report, words: str) -> Report:
    """The report with every text that a user or a server could supply replaced."""
    failure = replace(shown.shown.summary.failures[0], kind=words, example=words)
    levels = tuple(replace(each, summary=replace(each.summary, failures=(failure,))) for each in shown.levels)
    settings = replace(shown.settings, target=LoadTarget(words, chat=True))
    return replace(shown, model=words, notes=(words,), levels=levels, settings=settings, prompts=words)


def test_hostile_text_stays_text(single: Report) -> None:
    reader = Reader(report_page(hostile(single, HOSTILE)))
    assert reader.tags == Reader(report_page(hostile(single, "harmless"))).tags
    assert reader.text.count(HOSTILE) >= 5


def test_a_page_stays_small_however_long_the_load_was() -> None:
    few, many = (report_page(report(Open(40), level(Open(40), samples(40, number)))) for number in (300, 4000))
    assert "default-src 'none'" in few
    assert few.count("plotly.js v") == 1
    assert Reader(few).links == []
    assert len(many) < len(few) + 500_000


@pytest.mark.slow
@needs_browser
def test_in_a_browser(single: Report, swept: Report, tmp_path: Path) -> None:
    pages = {"desk": (report_page(hostile(single, HOSTILE)), 1200), "phone": (report_page(swept), 400)}
    assert check_in_browser(pages, tmp_path) == {
        "desk": ["plot-latency", "plot-timeline", "plot-prompt"],
        "phone": ["plot-sweep", "plot-latency", "plot-timeline", "plot-prompt"],
    }
