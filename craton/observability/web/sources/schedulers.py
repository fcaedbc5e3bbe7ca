"""What schedulers say of runs, asked once for everybody who looks: the list and every open page share the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from craton.orchestration import Standing
from craton.orchestration.watching import standings_of
from craton.telemetry import RunDirectory

FRESH_SECONDS = 5.0  # a scheduler has others to answer


class Schedulers:
    """`standings` of any number of runs: those that were asked about lately are not asked about again. Threads that
    want to know the same at once wait for one answer."""

    def __init__(self, ask: Callable[[Iterable[RunDirectory]], dict[str, Standing]] = standings_of) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._said: dict[Path, tuple[float, Standing]] = {}

    def standings(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Run's name → its standing."""
        asked = list(runs)
        with self._lock:
            oldest = time.monotonic() - FRESH_SECONDS
            self._said = {path: item for path, item in self._said.items() if item[0] > oldest}
            due = [run for run in asked if run.path not in self._said]
            if due:
                answers = self._ask(due)
                now = time.monotonic()
                self._said |= {run.path: (now, answers[run.name]) for run in due}
            return {run.name: self._said[run.path][1] for run in asked}
