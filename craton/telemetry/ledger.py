"""The ledger books every second of a rank's life to exactly one kind; the kinds sum to wall time.

In a rank a `LedgerClock` is always in one kind. On disk a line holds the seconds by kind since the rank's line before;
a negative number takes back what turned out to be of another kind (a step that was interrupted has to be redone).
`LedgerReader` adds up a run: within a generation the mean over the ranks that keep books; between two generations the
gap counts as `idle` when the earlier one failed or vanished (somebody wanted the run to run and it did not), and not at
all after a stop that was asked for. Wall time is the sum of it all, goodput the productive share of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.telemetry.lines import read_lines
from craton.telemetry.page import LEDGER_KINDS, RankPage, own_page
from craton.telemetry.rundirectory import RunDirectory

CHUNK_BYTES = 8 << 20
LOST_BOOKS_SECONDS = 1.5  # ranks that end a generation at different moments differ by less


class LedgerClock:
    """Always in exactly one kind. Under an agent it books into the page that both share, and goes on in the kind that
    the agent was booking; otherwise in memory of its own, from `started` on, in kind `start`."""

    def __init__(self, started: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._taken: dict[str, float] = {}
        shared = own_page() if started is None else None
        self.is_shared = shared is not None
        self.page = shared or RankPage.make()
        if shared is None:
            self.page.begin("start", now() - max(0.0, time.time() - (started or time.time())))

    @property
    def current(self) -> str:
        return self.page.kind

    def switch(self, kind: str) -> None:
        """From now on time is booked as `kind`."""
        assert kind in LEDGER_KINDS, f"{kind!r} is none of {LEDGER_KINDS}"
        self.page.switch(kind, self._now())
        self.page.beat()
        self.page.spring()

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Books the block as `kind`, then goes back to the kind before."""
        before = self.current
        self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """Seconds by kind since the last take; they sum to the wall time between the two."""
        totals = self.page.totals(self._now())
        before, self._taken = self._taken, totals
        taken = {kind: seconds - before.get(kind, 0.0) for kind, seconds in totals.items()}
        return {kind: seconds for kind, seconds in taken.items() if seconds}

    def begin_step(self, step: int) -> None:
        """What is booked from here on belongs to this step."""
        self.page.begin_step(step, self._now())

    def break_off(self, kind: str, since: float | None = None) -> None:
        """The step in progress will not be finished; see `RankPage.break_off`."""
        self.page.break_off(kind, since, self._now())
        self.page.beat()
        self.page.spring()


@dataclass
class GenerationBooks:
    """What the ranks of one generation booked so far."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)  # rank → kind → seconds
    begins: dict[int, float] = field(default_factory=dict)  # rank → where its books begin, epoch seconds
    end: float = 0.0
    outcomes: set[str] = field(default_factory=set)  # "done", "stopped", "failed", as the agents closed the books

    @property
    def begin(self) -> float:
        return min(self.begins.values(), default=float("inf"))

    @property
    def ended_well(self) -> bool:
        return bool(self.outcomes) and "failed" not in self.outcomes

    def add(self, line: dict[str, Any]) -> None:
        seconds, rank, moment = line.get("seconds"), line.get("rank"), line.get("time")
        if not isinstance(seconds, dict) or not isinstance(rank, int) or not isinstance(moment, int | float):
            return
        known = {
            kind: value for kind, value in seconds.items() if kind in LEDGER_KINDS and isinstance(value, int | float)
        }
        self.begins.setdefault(rank, moment - sum(known.values()))
        booked = self.seconds.setdefault(rank, {})
        for kind, value in known.items():
            booked[kind] = booked.get(kind, 0.0) + value
        self.end = max(self.end, moment)
        if isinstance(line.get("ended"), str):
            self.outcomes.add(line["ended"])

    def means(self, since: float = 0.0) -> dict[str, float]:
        """Seconds by kind, the mean over ranks. A rank whose node was lost has nobody who keeps its books: until the
        generation ends it waits. Books that were taken up again only count from `since`, the end of the generation
        before, which has counted that wait already."""
        counted = {rank: self._counted(rank, since) for rank in self.seconds}
        longest = max(sum(booked.values()) for booked in counted.values())
        totals: dict[str, float] = {}
        for booked in counted.values():
            missing = longest - sum(booked.values())
            for kind, seconds in (*booked.items(), ("waiting", missing if missing > LOST_BOOKS_SECONDS else 0.0)):
                if seconds:
                    totals[kind] = totals.get(kind, 0.0) + seconds
        return {kind: seconds / len(counted) for kind, seconds in totals.items()}

    def _counted(self, rank: int, since: float) -> dict[str, float]:
        booked, early = self.seconds[rank], since - self.begins[rank]
        if early <= LOST_BOOKS_SECONDS:
            return booked
        longest = max(booked, key=lambda kind: booked[kind])
        return {**booked, longest: max(0.0, booked[longest] - early)}


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
            if not books.seconds:
                continue
            for kind, seconds in books.means(before.end if before else 0.0).items():
                totals[kind] = totals.get(kind, 0.0) + seconds
            if before is not None and not before.ended_well and books.begin > before.end:
                totals["idle"] = totals.get("idle", 0.0) + books.begin - before.end
            before = books
        return {kind: totals[kind] for kind in LEDGER_KINDS if kind in totals}

    def by_generation(self) -> dict[int, dict[str, float]]:
        """Generation → seconds by kind, the mean over its ranks."""
        self._read()
        return {number: books.means() for number, books in sorted(self._generations.items()) if books.seconds}

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
