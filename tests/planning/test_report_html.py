"""The HTML report: complete, escaped, offline, and right in a real browser at the width of a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import date
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from craton.planning.report_html import plan_html
from craton.planning.result import Plan

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ALL_PLOTS = ["plot-step", "plot-memory", "plot-front", "plot-scaling", "plot-goodput", "plot-sensitivity"]


class Reader(HTMLParser):
    """What a reader sees: text outside scripts and styles; and which elements and plots there are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.plots: list[str] = []
        self.links: list[str] = []
        self._hidden = False
        self.feed(page)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag in ("script", "style", "title")
        attributes = dict(attrs)
        if attributes.get("class") == "plot":
            self.plots.append(attributes["id"] or "")
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)


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
    for shown in ("7.83 s", "7.21 – 8.52 s", "10.8 days", "$207 k", "1.07 M tokens/s", "45.2 % MFU", "105 GiB"):
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
        "Nothing was varied",
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


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not opened in a browser")
def test_in_a_browser(small_plan: Plan, giant_plan: Plan, tmp_path: Path) -> None:
    pages = {
        "desk": (plan_html(with_words(small_plan, HOSTILE), date(2026, 11, 20)), 1200),
        "phone": (plan_html(giant_plan, date(2026, 11, 20)), 400),
    }
    seen = open_in_browser(pages, tmp_path)
    # Turned from a desk to a phone, the page reflows and its plots are drawn again.
    views = {"desk": (seen["desk"], 1200), "phone": (seen["phone"], 400), "turned": (seen["desk"]["narrowed"], 400)}
    for name, (view, width) in views.items():
        assert view["errors"] == [], name
        assert view["requests"] == [], name
        assert view["scroll_width"] <= width, name
        for plot in view["plots"]:
            assert 0 < plot["right"] <= width, (name, plot)
            assert plot["marks"] > 0, (name, plot)
    assert [plot["id"] for plot in seen["desk"]["plots"]] == ALL_PLOTS
    assert [plot["id"] for plot in seen["phone"]["plots"]] == [
        name for name in ALL_PLOTS if name not in ("plot-front", "plot-scaling")
    ]


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


# Runs first in the page under test and collects what goes wrong; reports what is seen once loaded and when resized.
WATCHER = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => errors.push("policy: " + event.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...words) => errors.push(level + ": " + words.join(" "));
alert = (words) => errors.push("alert: " + words);
const report = (key) => parent.postMessage({ name: "NAME", key, view: {
  errors,
  requests: performance.getEntriesByType("resource").map((entry) => entry.name),
  scroll_width: document.documentElement.scrollWidth,
  plots: [...document.querySelectorAll(".plot")].map((plot) => ({
    id: plot.id,
    right: plot.querySelector("svg.main-svg")?.getBoundingClientRect().right ?? 0,
    marks: plot.querySelectorAll(".point, .js-line").length,
  })),
} }, "*");
addEventListener("load", () => report("loaded"));
// plotly redraws a moment after a resize: wait until it has, or report the overflow after some seconds.
addEventListener("resize", () => {
  const deadline = performance.now() + 5000;
  const overflows = () => [...document.querySelectorAll("svg.main-svg")].some(
    (svg) => svg.getBoundingClientRect().right > innerWidth);
  const wait = () => overflows() && performance.now() < deadline ? setTimeout(wait, 50) : report("narrowed");
  wait();
});
</script>"""

# An iframe is as narrow as it is told; a headless window is never narrower than 500 pixels.
FRAMES = """<!doctype html><body>FRAMES<pre id="seen">{}</pre><script>
addEventListener("message", ({ data }) => {
  const seen = JSON.parse(document.getElementById("seen").textContent);
  if (data.key === "loaded") seen[data.name] = data.view; else seen[data.name].narrowed = data.view;
  document.getElementById("seen").textContent = JSON.stringify(seen);
  const frame = document.getElementsByName(data.name)[0];
  if (data.key === "loaded" && frame.width > 400) frame.width = 400;
});
</script>"""


def open_in_browser(pages: dict[str, tuple[str, int]], folder: Path) -> dict[str, Any]:
    frames = []
    for name, (page, width) in pages.items():
        watched = page.replace("<head>", "<head>" + WATCHER.replace("NAME", name), 1)
        (folder / f"{name}.html").write_text(watched, encoding="utf-8")
        frames.append(f'<iframe name="{name}" src="{name}.html" width="{width}" height="900" frameborder="0"></iframe>')
    # The listener stands before the frames, so that no message is missed.
    head, script = FRAMES.split("FRAMES")
    (folder / "frames.html").write_text(head + script + "".join(frames), encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]
    # Virtual time runs ahead while nothing is pending, so this is a limit and not a wait.
    options += ["--virtual-time-budget=20000", "--dump-dom", (folder / "frames.html").as_uri()]
    done = subprocess.run([CHROMIUM, *options], capture_output=True, text=True, timeout=60, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen is not None, done.stderr[-2000:]
    result = json.loads(unescape(seen[1]))
    assert isinstance(result, dict)
    return result
