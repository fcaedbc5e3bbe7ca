"""Load times of the web page in Chromium, with 500 runs and with a run of 10,000 ranks, and response times of
`craton top` on that run.

    python benchmarks/page.py [OUT.json] [--runs 500] [--nodes 1250] [--ranks-per-node 8] [--steps 40] [--rounds 3]
    python benchmarks/page.py --only-top

Every round starts `craton ui` twice: `first` without a cache, `restarted` with the cached summaries of ended runs;
`again` reloads the page. Times are the browser's own, from the start of the navigation: `painted` is the first content,
`usable` when rows are listed and keys work, `screen` when every visible row is read, `whole` when everything is there
(all runs read; curves, heat map and nodes drawn).

For `top`, with a step of every rank every two seconds: `first` is from the start of the command to the first ranks,
`key` from a key press to the new screen, `look` the time to read the files after a step of all ranks (`look_cpu`: its
CPU time).
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "observability" / "web"
sys.path.insert(0, str(FOLDER))
from browser import Browser, Tab  # noqa: E402 - lies beside the tests
from simulated_runs import STEP_SECONDS, metrics_line, write_run, write_runs  # noqa: E402

from craton.observability.web import TopView  # noqa: E402
from craton.observability.web.sources import CachedVerdict  # noqa: E402
from craton.telemetry import RunDirectory  # noqa: E402

USABLE = {
    "list": "document.getElementById('counts')?.textContent.includes('run')",
    "run": "document.querySelector('[data-fragment=tiles] .value')",
}
SCREEN = {
    "list": f"{USABLE['list']} && ![...document.querySelectorAll('tr[data-state=reading]')]"
    ".some((row) => row.getBoundingClientRect().top < innerHeight)",
    "run": USABLE["run"],
}
SORTS = ("rank", "step time", "progress", "health")
KEYS, LOOKS = 40, 5
WHOLE = {  # verdicts load later
    "list": f"{USABLE['list']} && !document.querySelector('tr[data-state=reading]')",
    "run": "document.querySelectorAll('canvas[data-drawn]').length >= 6"
    " && ![...document.querySelectorAll('.loading')].some((each) => !each.closest('[data-fragment=verdict]'))",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-top", action="store_true")
    given = parser.parse_args()
    world = given.nodes * given.ranks_per_node
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        many, wide = Path(folder) / "many", Path(folder) / "wide"
        shape = {"nodes": given.nodes, "ranks_per_node": given.ranks_per_node, "steps": given.steps}
        run = write_run(wide, "wide", **shape, slow_rank=world // 3)
        if not given.only_top:
            write_runs(many, given.runs, given.steps)
            with Browser() as browser, beating(many, wide):
                results[f"{given.runs} runs"] = measure(browser, many, "", "list", given.rounds)
                results[f"{world} ranks"] = measure(browser, wide, "runs/wide", "run", given.rounds)
        steps = Steps(run, given.nodes, given.ranks_per_node, given.steps)
        with beating(wide):
            results[f"top of {world} ranks"] = {**measure_looks(run, steps), **measure_top(wide, steps)}
    document = {"date": date.today().isoformat(), "cores": os.cpu_count(), "milliseconds": results}
    text = json.dumps(document, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


@contextmanager
def beating(*roots: Path) -> Iterator[None]:
    """Touch the heartbeats of live runs, as their agents would: otherwise all are lost after seconds and not read."""
    # Those of lost runs were written as ten minutes old.
    oldest = time.time() - 300
    beats = [path for root in roots for path in root.glob("*/heartbeat/*") if path.stat().st_mtime > oldest]
    running = [path for path in beats if json.loads(path.read_text(encoding="utf-8"))["state"] == "running"]
    assert running, "no run has a heartbeat"
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(2.0):
            for path in running:
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Steps:
    """Write one step of all ranks of a run, as fast as files can be written."""

    def __init__(self, run: RunDirectory, nodes: int, ranks_per_node: int, steps: int) -> None:
        chance, world = random.Random(0), nodes * ranks_per_node
        self._newest = steps
        self._lines, self._statuses = {}, {}
        for number in range(nodes):
            node, ranks = f"node-{number}", range(number * ranks_per_node, (number + 1) * ranks_per_node)
            texts = [metrics_line(0, rank, node, time.time(), chance, world // 3) for rank in ranks]
            self._lines[run.metrics_path(node)] = "".join(texts)
            self._statuses[run.status_path(node)] = run.status_path(node).read_text(encoding="utf-8")

    def step(self) -> None:
        before, self._newest = self._newest, self._newest + 1
        for path, text in self._lines.items():
            with open(path, "a", encoding="utf-8") as file:
                file.write(text.replace('"step":0,', f'"step":{self._newest},'))
        for path, text in self._statuses.items():
            self._statuses[path] = text.replace(f'"step": {before},', f'"step": {self._newest},')
            fresh = path.with_suffix(".fresh")
            fresh.write_text(self._statuses[path], encoding="utf-8")
            os.replace(fresh, path)


def measure_looks(run: RunDirectory, steps: Steps) -> dict[str, float]:
    """Return medians in milliseconds."""
    view = TopView(run, examine=lambda run, prometheus: CachedVerdict("healthy", "all is well"))
    for _ in range(2):  # the second one reads what the first leaves for later
        view.look()
    seconds, of_cpu = [], []
    for _ in range(LOOKS):
        steps.step()
        began, cpu_began = time.perf_counter(), time.thread_time()
        view.look()
        seconds.append(time.perf_counter() - began)
        of_cpu.append(time.thread_time() - cpu_began)
    view.close()
    return {"look": round(1e3 * statistics.median(seconds)), "look_cpu": round(1e3 * statistics.median(of_cpu))}


def measure_top(root: Path, steps: Steps) -> dict[str, float]:
    """Return milliseconds; keys are pressed at any moment of a refresh."""
    began = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(CRATON_RUNS=str(root), TERM="xterm-256color", COLUMNS="140", LINES="50")
        os.execv(sys.executable, [sys.executable, "-m", "craton", "top", "wide"])
    is_over = threading.Event()

    def do_steps() -> None:
        while not is_over.wait(STEP_SECONDS):
            steps.step()

    thread = threading.Thread(target=do_steps, daemon=True)
    try:
        read_until(terminal, "sorted by rank")
        first = time.monotonic() - began
        thread.start()
        chance, waited = random.Random(0), []
        for number in range(1, KEYS + 1):
            drain(terminal, 0.2 + 0.8 * chance.random())
            pressed = time.monotonic()
            os.write(terminal, b"s")
            read_until(terminal, f"sorted by {SORTS[number % len(SORTS)]}")
            waited.append(time.monotonic() - pressed)
    finally:
        is_over.set()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    thread.join()
    found = {"first": first, "key": statistics.median(waited), "slowest_key": max(waited)}
    return {name: round(1e3 * seconds) for name, seconds in found.items()}


def read_until(terminal: int, words: str, seconds: float = 120.0) -> None:
    seen, deadline = "", time.monotonic() + seconds
    while words not in seen:
        assert time.monotonic() < deadline, f"not seen in {seconds} s: {words}"
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")


def drain(terminal: int, seconds: float) -> None:
    """Read the terminal output for this many seconds."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            os.read(terminal, 65536)


def measure(browser: Browser, root: Path, path: str, kind: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians over the rounds in milliseconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        environment = {**os.environ, "CRATON_RUNS": str(root), "XDG_CACHE_HOME": str(root.parent / f"cache-{number}")}
        for start in ("first", "restarted"):
            command = [sys.executable, "-m", "craton", "ui", "--port", "0", "--no-open", "--json"]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                address = json.loads(process.stdout.readline())["address"]
                tab = browser.open()
                tab.resize(1400, 1000)
                for name in (start, "again"):
                    for key, milliseconds in load(tab, address + path, kind).items():
                        found.setdefault(name, {}).setdefault(key, []).append(milliseconds)
                assert tab.errors == [], tab.errors
                tab.close()
            finally:
                process.terminate()
                process.wait(timeout=10)
    return {name: {key: round(statistics.median(each)) for key, each in times.items()} for name, times in found.items()}


def load(tab: Tab, address: str, kind: str) -> dict[str, float]:
    # The page itself checks every frame: a check from outside would be late.
    watch = f"""
      window.seen = {{}};
      const look = () => {{
        if (!seen.usable && ({USABLE[kind]})) seen.usable = performance.now();
        if (!seen.screen && ({SCREEN[kind]})) seen.screen = performance.now();
        if (!seen.whole && ({WHOLE[kind]})) seen.whole = performance.now();
        if (!seen.whole) requestAnimationFrame(look);
      }};
      addEventListener("DOMContentLoaded", look);
    """
    script = tab.call("Page.addScriptToEvaluateOnNewDocument", source=watch)["identifier"]
    tab.go("about:blank#")
    tab.call("Page.navigate", url=address)
    tab.wait_for("window.seen?.whole", seconds=120)
    tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    seen: dict[str, Any] = tab.evaluate("window.seen")
    painted = tab.wait_for(
        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    )  # else it is an error
    return {"painted": painted, **{name: seen[name] for name in ("usable", "screen", "whole")}}


if __name__ == "__main__":
    main()
