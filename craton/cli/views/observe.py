"""The view of `craton observe up`: targets and firing alerts, live in a terminal, else one line per change."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from craton.observability.prometheus import Observed, Observer, TargetKeeper

HEALTH_STYLES = {"up": "green", "down": "bold red", "unknown": "cyan"}
SEVERITY_STYLES = {"page": "bold red", "ticket": "yellow", "info": "cyan"}
MAX_TARGETS = 40  # listed one by one; more are counted by job


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that both programs are stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_until(observer: Observer, console: Console, as_json: bool, seconds: float | None) -> Observed | None:
    """Show the state until Ctrl-C or for `seconds`; return the last state."""
    trouble = _Trouble(console, as_json)
    if as_json:
        return _repeat(observer, seconds, _JsonLines(), trouble)
    if not console.is_terminal:
        return _repeat(observer, seconds, _Lines(console), trouble)
    from rich.live import Live

    with Live(console=console, refresh_per_second=2) as live:
        return _repeat(observer, seconds, lambda observed: live.update(_picture(observed)), trouble)


def keep_targets(
    keeper: TargetKeeper, every_seconds: float, seconds: float | None, console: Console, as_json: bool
) -> None:
    """Keep the target files up to date, for an existing Prometheus."""
    trouble = _Trouble(console, as_json)
    deadline = None if seconds is None else time.monotonic() + seconds
    has_explained = False
    while deadline is None or time.monotonic() < deadline:
        keeper.refresh()
        trouble(keeper.trouble)
        if not (keeper.targets or keeper.trouble or has_explained):
            console.print(keeper.why_empty(), style="yellow", markup=False, soft_wrap=True)
            has_explained = True
        time.sleep(every_seconds)


def _repeat(
    observer: Observer, seconds: float | None, show: Callable[[Observed], None], trouble: Callable[[str], None]
) -> Observed | None:
    deadline = None if seconds is None else time.monotonic() + seconds
    observed: Observed | None = None
    while deadline is None or time.monotonic() < deadline:
        observer.refresh()
        trouble(observer.keeper.trouble)
        try:
            observed = observer.look()
        except OSError:  # busy; refresh reports one that has ended
            pass
        else:
            show(observed)
        left = observer.settings.every_seconds if deadline is None else max(0.0, deadline - time.monotonic())
        time.sleep(min(observer.settings.every_seconds, left))
    return observed


class _Trouble:
    """Reports that targets could not be discovered, once per reason, and when discovery works again."""

    def __init__(self, console: Console, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        self._printed = ""

    def __call__(self, trouble: str) -> None:
        if trouble == self._printed:
            return
        self._printed = trouble
        if self._as_json:
            print(json.dumps({"event": "trouble", "trouble": trouble}), flush=True)
        else:
            text, style = (trouble, "yellow") if trouble else ("target discovery works again", "green")
            self._console.print(text, style=style, markup=False, soft_wrap=True)


class _JsonLines:
    """One JSON object per line, for every change."""

    def __init__(self) -> None:
        self._printed = ""

    def __call__(self, observed: Observed) -> None:
        alerts = [{**alert, "labels": dict(alert["labels"])} for alert in observed.alerts]
        line = json.dumps({"event": "seen", "targets": [dict(target) for target in observed.targets], "alerts": alerts})
        if line != self._printed:
            self._printed = line
            print(line, flush=True)


class _Lines:
    """One line for every target and alert that changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._health: dict[str, str] = {}
        self._firing: dict[str, str] = {}

    def __call__(self, observed: Observed) -> None:
        health = {
            f"{target['job']} {target['address']}{_whose(target)}": target["health"] for target in observed.targets
        }
        for name, state in health.items():
            if self._health.get(name) != state:
                self._console.print(f"{name}: {state}", style=HEALTH_STYLES.get(state, ""), markup=False)
        for name in self._health.keys() - health.keys():
            self._console.print(f"{name}: target removed", style="dim", markup=False)
        firing = {
            json.dumps(alert["labels"], sort_keys=True) + alert["name"]: _alert_text(alert) for alert in observed.firing
        }
        for key, text in firing.items():
            if key not in self._firing:
                self._console.print(f"ALERT {text}", style="bold red", markup=False, soft_wrap=True)
        for key in self._firing.keys() - firing.keys():
            self._console.print(f"resolved: {self._firing[key]}", style="green", markup=False, soft_wrap=True)
        self._health, self._firing = health, firing


def _picture(observed: Observed) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    targets = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if len(observed.targets) > MAX_TARGETS:
        for column in ("JOB", "UP", "TARGETS"):
            targets.add_column(column, justify="left" if column == "JOB" else "right")
        counted = Counter(item["job"] for item in observed.targets)
        up = Counter(target["job"] for target in observed.targets if target["health"] == "up")
        for job, count in sorted(counted.items()):
            style = "green" if up[job] == count else "bold red"
            targets.add_row(Text(job), Text(str(up[job]), style=style), str(count))
    else:
        for column in ("JOB", "ADDRESS", "RUN", "NODE", "HEALTH"):
            targets.add_column(column, no_wrap=True)
        for entry in observed.targets:
            health = Text(entry["health"], style=HEALTH_STYLES.get(entry["health"], ""))
            # As Text: rich would parse [fd00::5] in an address as markup.
            targets.add_row(*(Text(entry[key]) for key in ("job", "address", "run", "node")), health)
    alerts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("SEVERITY", "LAYER", "ALERT", "WHAT"):
        alerts.add_column(column, no_wrap=column != "WHAT", overflow="fold")
    for alert in observed.firing:
        severity = Text(alert["severity"], style=SEVERITY_STYLES.get(alert["severity"], ""))
        alerts.add_row(severity, Text(alert["layer"]), Text(alert["name"]), Text(alert["summary"]))
    waiting = len(observed.alerts) - len(observed.firing)
    parts: list[RenderableType] = [targets if observed.targets else Text("no targets: no live run", style="dim")]
    parts.append(alerts if observed.firing else Text("no firing alerts", style="green"))
    if waiting:
        parts.append(Text(f"{waiting} pending", style="dim"))
    return Group(*parts)


def _whose(target: Any) -> str:
    names = [name for name in (target["run"], target["node"]) if name]
    return f" ({' · '.join(names)})" if names else ""


def _alert_text(alert: Any) -> str:
    return f"[{alert['severity']}] {alert['name']}: {alert['summary']} — {alert['runbook']}"
