"""The ledger books every second of a rank's life to exactly one kind; the kinds sum to wall time.

In a rank a `LedgerClock` is always in one kind. On disk a line holds the seconds by kind since the rank's line before.
`LedgerReader` adds up a run: within a generation the mean over the ranks that keep books; between two generations the
gap counts as `idle` when the earlier one failed or vanished (somebody wanted the run to run and it did not), and not at
all after a stop that was asked for. Wall time is the sum of it all, goodput the productive share of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.telemetry.lines import read_lines
from craton.telemetry.rundirectory import RunDirectory

LEDGER_KINDS = (
    "waiting",
    "start",
    "compile",
    "productive",
    "data",
    "checkpoint",
    "evaluate",
    "detect",
    "regroup",
    "restore",
    "redo",
    "idle",
)
CHUNK_BYTES = 8 << 20


class LedgerClock:
    """Always in exactly one kind, from the moment the agent spawned this process ($CRATON_STARTED), in kind `start`."""

    def __init__(self, started: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        if started is None:
            started = _started_from_environment()
        self._now = now
        self._seconds: dict[str, float] = {}
        self._current = "start"
        self._since = now() - max(0.0, time.time() - started)

    @property
    def current(self) -> str:
        return self._current

    def switch(self, kind: str) -> None:
        """From now on time is booked as `kind`."""
        assert kind in LEDGER_KINDS, f"{kind!r} is none of {LEDGER_KINDS}"
        self._book()
        self._current = kind

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Books the block as `kind`, then goes back to the kind before."""
        before = self._current
        self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """Seconds by kind since the last take; they sum to the wall time between the two."""
        self._book()
        taken, self._seconds = self._seconds, {}
        return taken

    def _book(self) -> None:
        now = self._now()
        self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
        self._since = now


@dataclass
class GenerationBooks:
    """What the ranks of one generation booked so far."""

    seconds: dict[str, float] = field(default_factory=dict)  # sum over ranks
    ranks: set[int] = field(default_factory=set)
    begin: float = float("inf")  # epoch seconds
    end: float = 0.0
    outcomes: set[str] = field(default_factory=set)  # "done", "stopped", "failed", as the agents closed the books

    @property
    def ended_well(self) -> bool:
        return bool(self.outcomes) and "failed" not in self.outcomes

    def add(self, line: dict[str, Any]) -> None:
        seconds, rank, moment = line.get("seconds"), line.get("rank"), line.get("time")
        if not isinstance(seconds, dict) or not isinstance(rank, int) or not isinstance(moment, int | float):
            return
        for kind, value in seconds.items():
            if kind in LEDGER_KINDS and isinstance(value, int | float):
                self.seconds[kind] = self.seconds.get(kind, 0.0) + value
        if rank not in self.ranks:
            self.ranks.add(rank)
            self.begin = min(self.begin, moment - sum(seconds.values()))
        self.end = max(self.end, moment)
        if isinstance(line.get("ended"), str):
            self.outcomes.add(line["ended"])


class LedgerReader:
    """Adds up all ledger lines of a run; called again it reads only what is new."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.path / "ledger"
        self._offsets: dict[Path, int] = {}
        self._generations: dict[int, GenerationBooks] = {}

    def totals(self) -> dict[str, float]:
        """Wall seconds by kind, only kinds that occurred, in the order of LEDGER_KINDS."""
        self._read()
        totals: dict[str, float] = {}
        before: GenerationBooks | None = None
        for _, books in sorted(self._generations.items()):
            if not books.ranks:
                continue
            for kind, seconds in books.seconds.items():
                totals[kind] = totals.get(kind, 0.0) + seconds / len(books.ranks)
            if before is not None and not before.ended_well and books.begin > before.end:
                totals["idle"] = totals.get("idle", 0.0) + books.begin - before.end
            before = books
        return {kind: totals[kind] for kind in LEDGER_KINDS if kind in totals}

    def _read(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            while True:
                offset = self._offsets.get(path, 0)
                lines, self._offsets[path] = read_lines(path, offset, CHUNK_BYTES)
                for line in lines:
                    generation = line.get("generation")
                    if isinstance(generation, int):
                        self._generations.setdefault(generation, GenerationBooks()).add(line)
                if self._offsets[path] == offset:
                    break


def _started_from_environment() -> float:
    try:
        return float(os.environ["CRATON_STARTED"])
    except (KeyError, ValueError):
        return time.time()
