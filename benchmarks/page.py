"""How soon the page is there: 500 runs, and a run of 10,000 ranks, from the click to what is painted, in Chromium.

    python benchmarks/page.py [OUT.json] [--runs 500] [--nodes 1250] [--ranks-per-node 8] [--steps 40] [--rounds 3]

Every round starts `craton ui` twice: `first` has never seen these runs, `restarted` remembers those that have ended;
`again` loads the page once more. Times are the browser's own, from the beginning of the navigation: `painted` is the
first content, `usable` when rows are listed and keys work, `screen` when every row in sight is read, `whole` when
everything is there (all runs read; curves, heat map and nodes drawn).
"""

from __future__ import annotations

import argparse
import json
import os
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
from simulated_runs import write_run, write_runs  # noqa: E402

USABLE = {
    "list": "document.getElementById('counts')?.textContent.includes('run')",
    "run": "document.querySelector('[data-fragment=tiles] .value')",
}
SCREEN = {
    "list": f"{USABLE['list']} && ![...document.querySelectorAll('tr[data-state=reading]')]"
    ".some((row) => row.getBoundingClientRect().top < innerHeight)",
    "run": USABLE["run"],
}
WHOLE = {  # a verdict comes when it comes
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        many, wide = Path(folder) / "many", Path(folder) / "wide"
        write_runs(many, given.runs, given.steps)
        slow = given.nodes * given.ranks_per_node // 3
        shape = {"nodes": given.nodes, "ranks_per_node": given.ranks_per_node, "steps": given.steps}
        write_run(wide, "wide", **shape, slow_rank=slow)
        with beating(many, wide):
            results = {
                f"{given.runs} runs": measure(browser, many, "", "list", given.rounds),
                f"{given.nodes * given.ranks_per_node} ranks": measure(browser, wide, "runs/wide", "run", given.rounds),
            }
    document = {"date": date.today().isoformat(), "cores": os.cpu_count(), "milliseconds": results}
    text = json.dumps(document, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


@contextmanager
def beating(*roots: Path) -> Iterator[None]:
    """Touches the heartbeats of runs that run, as their agents would: else all are lost after seconds, and not read."""
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


def measure(browser: Browser, root: Path, path: str, kind: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds, in milliseconds."""
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
    # Looked at with every frame by the page itself: a look from outside would come late.
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
