"""The page in a real browser: what is seen, what changes by itself, keys, dark mode; a run that is really stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import Tab
from page_server import TOKEN, PageServer
from simulated_runs import metrics_line, write_run, write_runs
from waiting import PATIENCE_SECONDS, wait_until

from craton.observability.web import run_page
from craton.observability.web.http import application
from craton.observability.web.sources import CachedVerdict, Late, Verdicts
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory, find_run, list_runs, summarize

Serve = Callable[..., PageServer]
RANK = Path(__file__).parents[2] / "orchestration" / "rank.py"
HOSTILE = "<img src=x onerror=alert(1)>"
NAMES = "[...document.querySelectorAll('#runs tbody tr:not([hidden]) a')].map((link) => link.textContent)"


def test_runs_are_listed_filtered_sorted_and_opened_by_keyboard(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    write_runs(tmp_path / "runs", 14, steps=4)
    tab.go(serve().address)
    tab.wait_for("document.querySelectorAll('#runs tbody tr[data-state=running]').length === 2")
    assert tab.evaluate("document.getElementById('counts').textContent") == "14 runs"
    tab.press("/")
    tab.type("failed")
    assert tab.evaluate(NAMES) == ["llama-8b-011", "llama-8b-004"]
    tab.press("Enter")
    tab.press("j")
    assert tab.evaluate("document.querySelector('tr.current').dataset.name") == "llama-8b-004"
    tab.press("Escape")
    assert len(tab.evaluate(NAMES)) == 14
    tab.click("th[data-sort=name] button")
    assert tab.evaluate(NAMES) == sorted(tab.evaluate(NAMES))
    tab.click("th[data-sort=name] button")
    assert tab.evaluate(NAMES) == sorted(tab.evaluate(NAMES), reverse=True)
    tab.click("#chips button[data-state=running]")
    assert tab.evaluate(NAMES) == ["llama-8b-013", "llama-8b-006"]
    tab.press("?")
    tab.wait_for("document.getElementById('help-dialog').open")
    tab.press("Escape")
    tab.wait_for("!document.getElementById('help-dialog').open")
    tab.evaluate("document.activeElement.blur()")
    tab.press("k")
    tab.press("k")
    tab.press("Enter")
    tab.wait_for("location.pathname === '/runs/llama-8b-013'")
    tab.wait_for("document.querySelector('canvas[data-chart=heat]').dataset.drawn")
    tab.press("Escape")
    tab.wait_for("location.pathname === '/'")


def test_a_run_is_shown_with_its_curves_ranks_nodes_and_verdict(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    write_run(tmp_path / "runs", "llama", nodes=4, ranks_per_node=4, steps=40, slow_rank=6)

    def examine(run: RunDirectory) -> CachedVerdict:
        late = Late("rank 6 on node-1 spends 1.50 times as long", (6,), ("node-1",), 0.25)
        words = f"rank 6 is throttled {HOSTILE}"
        return CachedVerdict("slow", words, "device", "node-1", 6, 0.8, "drain node-1", (HOSTILE,), late=late)

    tab.go(f"{serve(verdicts=Verdicts(examine)).address}runs/llama")
    tab.wait_for("document.querySelector('[data-fragment=ranks] h3')?.textContent.includes('Rank 6 on node-1')")
    tab.wait_for("document.getElementById('verdict')?.textContent.includes('rank 6 is throttled')")
    drawn = "[...document.querySelectorAll('canvas[data-drawn]')].map((each) => each.dataset.chart)"
    tab.wait_for(f"{drawn}.length === 6")
    assert set(tab.evaluate(drawn)) == {"loss", "speed", "step", "gradient", "heat", "topology"}
    assert tab.evaluate(painted("loss")) > 200
    assert tab.evaluate(painted("heat")) > 1000
    text = tab.evaluate("document.querySelector('main').innerText")
    for words in ("40 / 400", "plan 41%", "node-1", "checkpoint saved", "nvme", "productive", "Action: drain node-1"):
        assert words in text, words
    assert HOSTILE in text  # as text: nothing of it became an element
    assert tab.evaluate("document.querySelectorAll('main img').length") == 0
    assert tab.wait_for("document.getElementById('log').textContent.includes('<b>step 1</b>')")
    for chart, way in ARROWS_LEAD_TO.items():
        for (key, tip), written in zip(way, tab.evaluate(written_after(chart, [key for key, _ in way])), strict=True):
            assert any(text.startswith(tip) for text in written), (chart, key, tip, written)
    assert tab.evaluate("document.documentElement.scrollWidth <= 1400")
    tab.resize(420, 900)
    tab.wait_for("document.documentElement.scrollWidth <= 420")


# Of 16 ranks and 5 phases, of 40 steps, and of 4 nodes in a row; the first key points at what is in the middle.
ARROWS_LEAD_TO = {
    "heat": [
        ("Up", "rank 7 on node-1"),
        ("Right", "rank 8 on node-2"),
        ("Right", "rank 9 on node-2"),
        ("Up", "communication "),
        ("Left", "rank 8 on node-2"),
        ("Down", "optimizer "),
        ("Down", "checkpoint "),
    ],
    "loss": [("Right", "step 20"), ("Right", "step 21"), ("Left", "step 20")],
    "topology": [("Left", "node-3"), ("Left", "node-2"), ("Right", "node-3")],
}


def written_after(chart: str, keys: list[str]) -> str:
    """What a chart writes after each of the arrows."""
    return f"""(async () => {{
      const canvas = document.querySelector('canvas[data-chart={chart}]');
      const pen = canvas.getContext('2d');
      const found = [];
      for (const key of {json.dumps(keys)}) {{
        const written = [];
        pen.fillText = (text) => written.push(text);
        canvas.dispatchEvent(new KeyboardEvent('keydown', {{key: `Arrow${{key}}`}}));
        await new Promise(requestAnimationFrame);
        found.push(written);
      }}
      delete pen.fillText;
      return found;
    }})()"""


def painted(chart: str) -> str:
    """How many pixels of a chart have colour."""
    return f"""(() => {{
      const canvas = document.querySelector('canvas[data-chart={chart}]');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let at = 0; at < data.length; at += 4) {{
        const [r, g, b, a] = data.slice(at, at + 4);
        count += a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60;
      }}
      return count;
    }})()"""


def test_what_a_run_writes_is_seen_without_loading_again(
    serve: Serve, tmp_path: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(run_page, "QUICK_SECONDS", 0.1)
    run = write_run(tmp_path / "runs", "llama", nodes=1, ranks_per_node=1, steps=5)
    address = serve().address
    tab.go(f"{address}runs/llama")
    tab.wait_for("document.querySelector('[data-fragment=tiles]').textContent.includes('5 / 400')")
    tab.wait_for("document.getElementById('log').textContent.includes('step 1')")
    tab.evaluate("window.stays = 'here'")
    with open(run.metrics_path("node-0"), "a", encoding="utf-8") as file:
        for step in (6, 7):
            file.write(metrics_line(step, 0, "node-0", time.time(), random.Random(0)))
    with open(run.log_path(0), "a", encoding="utf-8") as file:
        file.write("something new\n" + "much of it\n" * 30_000 + "and its end\n")
    os.utime(run.heartbeat_path("node-0"))
    tab.wait_for("document.querySelector('[data-fragment=tiles]').textContent.includes('7 / 400')")
    tab.wait_for("document.getElementById('log').textContent.includes('and its end')")
    log = tab.evaluate("document.getElementById('log').textContent").splitlines()
    assert log[:3] == ["rank 0 began", "<b>step 1</b> & more", "something new"]
    assert [line for line in log if line.startswith("… skipped ")] == ["… skipped 199 kB"]
    run.mark("FATAL", "rank 0 ran out of memory")
    (run.heartbeat_path("node-0")).write_text(
        json.dumps({"generation": 0, "state": "failed", "pid": 1, "metrics_port": 0})
    )
    tab.wait_for("document.getElementById('state').dataset.state === 'failed'")
    tab.wait_for("document.querySelector('.message').textContent.includes('out of memory')")
    tab.wait_for(
        "!document.querySelector('[data-action=resume]').hidden && document.querySelector('[data-action=stop]').hidden"
    )
    assert tab.evaluate("window.stays") == "here"
    again = write_run(tmp_path / "other", "llama", nodes=1, ranks_per_node=1, steps=2)
    run.path.rename(tmp_path / "deleted")
    again.path.rename(run.path)
    tab.wait_for("!window.stays && document.querySelector('[data-fragment=tiles]').textContent.includes('2 / 400')")


def test_a_new_run_and_its_progress_come_into_the_list(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    write_run(tmp_path / "runs", "first", nodes=1, steps=3)
    tab.go(serve().address)
    tab.wait_for("document.querySelector('tr[data-name=first]').dataset.state === 'running'")
    second = "second-continued-pretraining-on-code-and-mathematics-v2-2026-11-16"
    write_run(tmp_path / "runs", second, nodes=1, steps=3, state="done")
    tab.wait_for(f"document.querySelector('tr[data-name={second}]')?.dataset.state === 'done'")
    assert tab.evaluate(NAMES) == [second, "first"]
    over = "document.querySelector('%s').getBoundingClientRect()"
    name, state = over % f"tr[data-name={second}] a", over % f"tr[data-name={second}] .state"
    for width in (1400, 390):  # a long name has several lines, and runs into nothing
        tab.resize(width, 900)
        assert tab.evaluate(f"{name}.right < {state}.left"), width


def test_dark_as_the_system_says_or_as_was_chosen(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    background = "getComputedStyle(document.body).backgroundColor"
    tab.go(serve().address)
    light = tab.evaluate(background)
    tab.prefer("dark")
    dark = tab.evaluate(background)
    assert dark != light
    tab.press("t")
    assert tab.evaluate(background) == light
    tab.call("Page.reload")
    tab.wait_for("document.readyState === 'complete' && document.documentElement.dataset.theme === 'light'")
    assert tab.evaluate(background) == light
    tab.press("t")
    tab.prefer("light")
    assert tab.evaluate(background) == dark


def test_the_contrast_of_text_suffices_in_light_and_dark(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    """At least 4.5 to 1, as WCAG 2 asks of small text."""
    write_runs(tmp_path / "runs", 7, steps=3)
    tab.go(serve().address)
    tab.wait_for("document.querySelectorAll('tr[data-state=reading]').length === 0")
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        assert tab.evaluate(CONTRASTS) == [], scheme


CONTRASTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((c) => linear(c / 255))
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = parse(getComputedStyle(each).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || !element.offsetParent || element.closest("noscript, .hidden")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${text.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
})()"""


@pytest.fixture
def counting_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A real run on this machine whose ranks count steps until they are told to stop."""
    import subprocess

    root = tmp_path / "runs"
    monkeypatch.setenv("CRATON_RUNS", str(root))
    job = tmp_path / "count.yaml"
    job.write_text(
        f"name: count\nkind: command\ncommand: [{sys.executable}, {RANK}]\ncluster: local x 1\n"
        "run: {env: {STEPS: '100000', STEP_SECONDS: '0.05'}}\n"
    )
    command = [sys.executable, "-m", "craton", "run", str(job), "--detach", "--yes"]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    run = find_run("count", root)
    wait_until(lambda: summarize(run).step >= 2, lambda: summarize(run))
    yield run
    for each in list_runs(root):
        if living_agents(each):
            kill_run(each)


def test_a_real_run_is_stopped_with_the_token_and_not_without(
    serve: Serve, counting_run: RunDirectory, tab: Tab
) -> None:
    page = serve()
    tab.go(f"{page.address}runs/count")
    tab.click("[data-action=stop]")  # asks for the token, which this browser does not have
    tab.wait_for("document.getElementById('token-dialog').open")
    refused = "fetch('/runs/count/stop', {method: 'POST'}).then((answer) => answer.status)"
    assert tab.evaluate(refused) == 403
    tab.wait_for("true")
    assert tab.errors.pop().startswith("log: Failed to load resource: the server responded with a status of 403")
    assert not counting_run.has("STOP")
    tab.click("#token")
    tab.type("wrong")
    tab.press("Enter")
    tab.wait_for("document.getElementById('token-error').textContent.includes('not the token')")
    assert tab.errors.pop().startswith("log: Failed to load resource: the server responded with a status of 403")
    tab.evaluate("document.getElementById('token').value = ''")
    tab.type(TOKEN)
    tab.press("Enter")
    tab.wait_for("'mayChange' in document.body.dataset")
    tab.click("[data-action=stop]")
    tab.wait_for("document.getElementById('confirm-dialog').open")
    tab.click("#confirm-yes")
    tab.wait_for("document.getElementById('state').dataset.state === 'stopped'")
    assert counting_run.has("STOP")
    tab.wait_for("!document.querySelector('[data-action=resume]').hidden")
    tab.click("[data-action=resume]")
    assert "Its price is unknown." in tab.evaluate("document.getElementById('confirm-dialog').textContent")
    tab.click("#confirm-yes")
    tab.wait_for("document.getElementById('state').dataset.state === 'running'")
    assert not counting_run.has("STOP")


def test_the_link_with_the_token_logs_in_and_leaves_no_token_in_the_address(
    serve: Serve, tmp_path: Path, tab: Tab
) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    page = serve()
    tab.go(page.address)
    tab.go(page.link)  # given to the page that is open there, which loads nothing
    tab.wait_for("'mayChange' in document.body.dataset")
    assert "token" not in tab.evaluate("location.href")
    assert tab.evaluate("document.cookie") == ""  # no script can read it
    assert tab.evaluate("localStorage.getItem('craton-secret').length") >= 32
    tab.evaluate("localStorage.removeItem('craton-secret')")  # the cookie stays, which alone allows nothing
    tab.call("Page.reload")
    tab.wait_for("!('mayChange' in document.body.dataset)")
    assert tab.evaluate("document.getElementById('unlock').textContent") == "Unlock changes"


def test_escape_leaves_the_search_in_a_log_and_a_stream_that_ended_is_said(
    serve: Serve, tmp_path: Path, tab: Tab
) -> None:
    run = write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    tab.go(f"{serve().address}runs/llama")
    tab.wait_for("document.getElementById('log').textContent.includes('step 1')")
    tab.click("#log-find")
    tab.type("began")
    tab.wait_for("!document.getElementById('log').textContent.includes('step 1')")
    tab.press("Escape")
    tab.wait_for("document.getElementById('log').textContent.includes('step 1')")
    assert tab.evaluate("location.pathname") == "/runs/llama"
    shutil.rmtree(run.path)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    for value in ("true", "false"):  # as if somebody looked at another tab, and came back
        tab.evaluate(hide % value + "document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait_for("document.getElementById('live').textContent.includes('reload the page')")
    tab.call("Page.navigate", url="about:blank")  # the page asks for the log again and again
    tab.wait_for("location.href === 'about:blank'")
    tab.errors.clear()  # the browser's own words about the 404


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])  # another site; the same site, which cookies are sent to
def test_another_website_can_neither_change_nor_read(serve: Serve, tmp_path: Path, tab: Tab, host: str) -> None:
    write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    done: list[Any] = []
    page = serve(do=lambda action, run: done.append(action))
    tab.go(page.link)
    tab.wait_for("'mayChange' in document.body.dataset")
    with other_website(host) as address:
        tab.go(address)
        target = f"{page.address}runs/llama/stop"
        for sent in ("{method: 'POST'}", "{method: 'POST', credentials: 'include', mode: 'no-cors'}"):
            tab.evaluate(f"fetch('{target}', {sent}).then(() => 0, () => 0)")
        form = f"<form method=post action='{target}' target=frame></form><iframe name=frame></iframe>"
        tab.evaluate(f"document.body.innerHTML = {json.dumps(form)}")
        answered = (
            "new Promise((done) => { document.querySelector('iframe').onload = done; document.forms[0].submit(); })"
        )
        tab.evaluate(f"{answered}.then(() => 0)")
        read = f"fetch('{page.address}', {{credentials: 'include'}}).then((answer) => answer.text(), () => 'refused')"
        assert tab.evaluate(read) == "refused"
    assert done == []
    assert tab.errors
    tab.errors.clear()  # the browser told of everything it refused


class other_website:  # noqa: N801 - reads as a sentence
    """An empty page at another origin of this machine."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __enter__(self) -> str:
        class Empty(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(b"<!doctype html><link rel=icon href='data:,'><body>")

            def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name it has there
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://{self._host}:{self._server.server_port}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_folder_with_a_hostile_name_is_text(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    run = write_run(tmp_path / "runs", "llama", nodes=1, steps=3)
    run.path.rename(run.path.with_name("<img src=x onerror=alert(1)>&'\""))
    tab.go(serve().address)
    tab.wait_for("document.querySelector('#runs tbody tr')?.dataset.state === 'running'")
    assert tab.evaluate(NAMES) == ["<img src=x onerror=alert(1)>&'\""]
    tab.press("j")
    tab.press("Enter")
    tab.wait_for("document.querySelector('h1')?.textContent.startsWith('<img')")
    tab.wait_for("document.querySelector('[data-fragment=tiles]').textContent.includes('3 / 400')")
    assert tab.evaluate("document.querySelectorAll('img').length") == 0


@pytest.mark.slow
def test_ten_thousand_ranks_and_five_hundred_runs_are_there_at_once(serve: Serve, tmp_path: Path, tab: Tab) -> None:
    """The bar of one second is measured by benchmarks/page.py on a quiet machine; here only that all of it comes."""
    write_runs(tmp_path / "runs", 499, steps=4)
    wide = write_run(tmp_path / "runs", "wide", nodes=1250, ranks_per_node=8, steps=14, slow_rank=3333)
    for beat in (wide.path / "heartbeat").iterdir():
        os.utime(beat, (time.time() + 600,) * 2)  # its ranks are compared while it lives
    is_over = threading.Event()

    def examine(run: RunDirectory) -> CachedVerdict:  # as long as a wide run's takes, or longer
        is_over.wait(PATIENCE_SECONDS)
        return CachedVerdict("healthy", "all is well")

    page = serve(verdicts=Verdicts(examine))
    tab.go(page.address)
    assert tab.evaluate("document.querySelectorAll('#runs tbody tr').length") == 500
    tab.wait_for("document.querySelectorAll('tr[data-state=reading]').length === 0")
    tab.go(f"{page.address}runs/wide")
    tab.wait_for("document.querySelector('[data-fragment=ranks] h3')?.textContent.includes('Rank 3333')")
    tab.wait_for("document.querySelector('canvas[data-chart=topology]').dataset.drawn")
    assert "1,250 nodes of 8 ranks" in tab.evaluate("document.querySelector('[data-fragment=nodes]').textContent")
    is_over.set()
