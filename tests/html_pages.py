"""Pages as a reader sees them: their text, and what a real browser makes of them as wide as a desk and as a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_SECONDS

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PHONE_PIXELS = 400

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: the page is not opened in a browser"
)


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


def check_in_browser(
    pages: dict[str, tuple[str, int]], folder: Path, turned: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Opens pages at their widths in pixels: nothing fails, nothing is loaded, nothing is wider than the page, every
    plot is drawn; the same of those that are then turned to a phone. Returns the names of each page's plots."""
    seen = open_in_browser(pages, folder)
    views = [(name, seen[name], width) for name, (_, width) in pages.items()]
    views += [(f"{name}, turned", seen[name]["narrowed"], PHONE_PIXELS) for name in turned]
    for name, view, width in views:
        assert view["errors"] == [], name
        assert view["requests"] == [], name
        assert view["scroll_width"] <= width, name
        for plot in view["plots"]:
            assert 0 < plot["right"] <= width, (name, plot)
            assert plot["marks"] > 0, (name, plot)
    return {name: [plot["id"] for plot in seen[name]["plots"]] for name in pages}


def open_in_browser(pages: dict[str, tuple[str, int]], folder: Path) -> dict[str, Any]:
    """What is seen of each page at its width, and as "narrowed" of a wide one once it is as narrow as a phone."""
    frames = []
    for name, (page, width) in pages.items():
        watched = page.replace("<head>", "<head>" + WATCHER.replace("NAME", name), 1)
        (folder / f"{name}.html").write_text(watched, encoding="utf-8")
        frames.append(f'<iframe name="{name}" src="{name}.html" width="{width}" height="900" frameborder="0"></iframe>')
    # The listener stands before the frames, so that no message is missed.
    around = AROUND.replace("PHONE", str(PHONE_PIXELS))
    (folder / "frames.html").write_text(around + "".join(frames), encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]
    # Virtual time runs ahead while nothing is pending, so this is a limit and not a wait.
    options += ["--virtual-time-budget=20000", "--dump-dom", (folder / "frames.html").as_uri()]
    done = subprocess.run([CHROMIUM, *options], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen is not None, done.stderr[-2000:]
    result = json.loads(unescape(seen[1]))
    assert isinstance(result, dict)
    return result


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
    fills: [...plot.querySelectorAll("path.point")].map((mark) => [mark.style.fill, Number(mark.style.fillOpacity)]),
    words: plot.textContent,
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
AROUND = """<!doctype html><body><pre id="seen">{}</pre><script>
addEventListener("message", ({ data }) => {
  const seen = JSON.parse(document.getElementById("seen").textContent);
  if (data.key === "loaded") seen[data.name] = data.view; else seen[data.name].narrowed = data.view;
  document.getElementById("seen").textContent = JSON.stringify(seen);
  const frame = document.getElementsByName(data.name)[0];
  if (data.key === "loaded" && frame.width > PHONE) frame.width = PHONE;
});
</script>"""
