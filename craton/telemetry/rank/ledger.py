"""The ledger books every second of a rank's life to exactly one kind; the kinds sum to wall time.

In a rank a `LedgerClock` is always in one kind. On disk a line has the seconds by kind since the rank's previous line,
until its time, which is of a clock that does not jump (`steady_clock`). A negative number moves seconds to another kind
(an interrupted step must be redone). `LedgerReader` adds up a run: at every moment the mean over the ranks whose ledger
covers it. A gap that no rank covers is `idle` if the previous generation failed or vanished (the run should have run
but did not), and is not counted after a requested stop. Wall time is the sum of all kinds; goodput is the share of the
productive ones (PRODUCTIVE_KINDS).

A day of eight ranks is 700,000 lines. So the coordinating agent keeps its totals in `ledger/.books.json`, with the
offsets it has read, and every reader continues from there. Without that file, the files of all nodes are read in
parallel, in the order of time, and added up on the way, so that a reader holds only a part of each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from pathlib import Path
from typing import Any

from craton.telemetry.files import paths_in, read_lines
from craton.telemetry.rank.shared_memory import LEDGER_KINDS, RankPage, own_page
from craton.telemetry.rundirectory import RunDirectory, read_json

CHUNK_BYTES = 4 << 20  # read before adding up, of all files together
MIN_CHUNK_BYTES = 8 << 10  # of one file
MIN_ENTRIES = 10_000  # pending before any are added up: sorting a few repeatedly takes longer
LATE_SECONDS = 10.0  # a line may become visible this much later than one of another node
KEPT_FILE = ".books.json"
MAX_LINE_SECONDS = 10 * 366 * 86400.0  # of one line; NaN is not below it
MAX_MOMENT = 4102444800.0  # the year 2100: a clock beyond it would add its error to the totals
SHORTEST_SECONDS = 1e-6  # length of a line that only moves seconds between kinds


class LedgerClock:
    """Always in exactly one kind. Under an agent it books into the page they share, and continues with the kind that
    the agent was booking; otherwise into its own memory, from `started` on, beginning with kind `start`."""

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
        """Book time as `kind` from now on."""
        assert kind in LEDGER_KINDS, f"{kind!r} is not one of {LEDGER_KINDS}"
        self.page.switch(kind, self._now())
        self.page.beat()
        self.page.spring()

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Book the block as `kind`, then return to the previous kind."""
        before = self.current
        self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """Return the seconds by kind since the last call; they sum to the wall time between the two."""
        totals = self.page.totals(self._now())
        before, self._taken = self._taken, totals
        taken = {kind: seconds - before.get(kind, 0.0) for kind, seconds in totals.items()}
        return {kind: seconds for kind, seconds in taken.items() if seconds}

    def begin_step(self, step: int) -> None:
        """Begin a step: time booked from now on belongs to it."""
        self.page.begin_step(step, self._now())

    def break_off(self, kind: str, since: float | None = None) -> None:
        """Abandon the step in progress; see `RankPage.break_off`."""
        self.page.break_off(kind, since, self._now())
        self.page.beat()
        self.page.spring()


@dataclass
class GenerationBooks:
    """The ledger of one generation's ranks so far."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)  # rank → kind → seconds

    def add(self, rank: int, seconds: Mapping[str, float]) -> None:
        booked = self.seconds.setdefault(rank, {})
        for kind, value in seconds.items():
            booked[kind] = booked.get(kind, 0.0) + value

    def means(self) -> dict[str, float]:
        """Return the seconds by kind, averaged over ranks."""
        kinds = {kind for booked in self.seconds.values() for kind in booked}
        return {
            kind: sum(booked.get(kind, 0.0) for booked in self.seconds.values()) / len(self.seconds)
            for kind in LEDGER_KINDS
            if kind in kinds
        }


@dataclass(order=True)
class _Entry:
    """A ledger line as an interval of time."""

    begin: float  # epoch seconds
    end: float
    generation: int = field(compare=False)
    seconds: dict[str, float] = field(compare=False)
    ended: str | None = field(compare=False)  # "done", "stopped", "failed": how the agent closed the ledger


@dataclass
class _Sweep:
    """Adds up intervals in the order of time: at every moment the mean over the ranks whose ledger covers it."""

    totals: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    active: list[tuple[float, _Entry]] = field(default_factory=list)  # a heap, by end
    rates: dict[str, float] = field(default_factory=dict)  # the sum over active entries
    generation: int = -1  # the newest whose ledger was closed
    ended_well: bool = False

    def copy(self) -> _Sweep:
        return _Sweep(dict(self.totals), self.at, list(self.active), dict(self.rates), self.generation, self.ended_well)

    def add(self, entry: _Entry) -> None:
        """Add an entry; entries must arrive in the order of their beginnings."""
        self.advance(entry.begin)
        length = entry.end - max(entry.begin, self.at or entry.begin)
        if length <= 0:
            return
        for kind, seconds in entry.seconds.items():
            self.rates[kind] = self.rates.get(kind, 0.0) + seconds / (entry.end - entry.begin)
        heappush(self.active, (entry.end, entry))

    def advance(self, moment: float) -> None:
        """Book everything until this moment."""
        while self.active and self.active[0][0] <= moment:
            end, entry = self.active[0]
            self._book(end)
            heappop(self.active)
            for kind, seconds in entry.seconds.items():
                self.rates[kind] -= seconds / (entry.end - entry.begin)
            if not self.active:
                self.rates.clear()  # with their rounding errors
            if entry.generation > self.generation:
                self.generation, self.ended_well = entry.generation, False
            if entry.ended is not None:
                self.ended_well = entry.ended != "failed"
        self._book(moment)

    def _book(self, moment: float) -> None:
        before, self.at = self.at, moment if self.at is None else max(self.at, moment)
        if before is None or moment <= before:
            return
        if self.active:
            for kind, rate in self.rates.items():
                self.totals[kind] = self.totals.get(kind, 0.0) + rate / len(self.active) * (moment - before)
        elif not self.ended_well:  # the run should have run but did not
            self.totals["idle"] = self.totals.get("idle", 0.0) + moment - before


class LedgerReader:
    """Adds up all ledger lines of a run; later calls read only new lines. With `most_nodes` it continues from the saved
    totals of all nodes with a sample of that many, evenly spread: ranks wait for each other, so their ledgers hardly
    differ."""

    def __init__(self, run: RunDirectory, most_nodes: int | None = None) -> None:
        self._folder = run.path / "ledger"
        self._most_nodes = most_nodes
        self._offsets: dict[Path, int] = {}
        self._generations: dict[int, GenerationBooks] = {}
        self._settled = _Sweep()  # until LATE_SECONDS before the newest line
        self._pending: list[_Entry] = []  # begins after that
        self._has_begun = False

    def totals(self) -> dict[str, float]:
        """Return wall seconds by kind, only kinds that occurred, in the order of LEDGER_KINDS."""
        self._read()
        newest = max((entry.end for entry in self._pending), default=0.0)
        self._settle(newest - LATE_SECONDS)
        sweep = self._settled.copy()
        for entry in self._pending:
            sweep.add(entry)
        sweep.advance(max([newest, *(end for end, _ in sweep.active)], default=0.0))
        return {kind: sweep.totals[kind] for kind in LEDGER_KINDS if kind in sweep.totals}

    def by_generation(self) -> dict[int, dict[str, float]]:
        """Return generation → seconds by kind, averaged over its ranks."""
        self._read()
        return {number: books.means() for number, books in sorted(self._generations.items())}

    def keep(self) -> None:
        """Save the totals for other readers; if the disk refuses, they only take longer."""
        sweep = {**vars(self._settled), "active": [vars(entry) for _, entry in self._settled.active]}
        document = {
            "offsets": {path.name: offset for path, offset in self._offsets.items()},
            "generations": {number: books.seconds for number, books in self._generations.items()},
            "settled": sweep,
            "pending": [vars(entry) for entry in self._pending],
        }
        partial = self._folder / f"{KEPT_FILE}.{os.getpid()}"
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
            os.replace(partial, self._folder / KEPT_FILE)

    def _take_up(self, paths: list[Path]) -> None:
        """Load the totals that another reader saved, if they belong to these files."""
        document = read_json(self._folder / KEPT_FILE)
        try:
            offsets = {self._folder / str(name): int(offset) for name, offset in document["offsets"].items()}
            if not set(offsets) <= set(paths) or any(path.stat().st_size < read for path, read in offsets.items()):
                return
            generations = {
                int(number): GenerationBooks({int(rank): dict(booked) for rank, booked in books.items()})
                for number, books in document["generations"].items()
            }
            settled = dict(document["settled"])
            active = [_Entry(**entry) for entry in settled.pop("active")]
            sweep = _Sweep(**settled, active=[(entry.end, entry) for entry in active])
            pending = [_Entry(**entry) for entry in document["pending"]]
        except (KeyError, TypeError, ValueError, AttributeError, OSError):  # missing, or of another version
            return
        heapify(sweep.active)
        self._offsets, self._generations, self._settled, self._pending = offsets, generations, sweep, pending
        if self._most_nodes is not None:  # later lines of most nodes are not read: do not wait for them
            self._settle(math.inf)

    def _read(self) -> None:
        """Read new lines, first from the file that is furthest behind; settle entries that precede all files."""
        paths = paths_in(self._folder, "*.jsonl")
        if not self._has_begun:
            self._take_up(paths)
        self._has_begun = True
        chosen = spread(paths, self._most_nodes)
        chunk_bytes = max(MIN_CHUNK_BYTES, CHUNK_BYTES // max(1, len(chosen)))
        unread = [(-math.inf, path) for path in chosen]  # a heap, by the newest moment that was read of a file
        most_entries = len(self._pending) + MIN_ENTRIES
        while unread:
            newest, path = heappop(unread)
            offset, num_before = self._offsets.get(path, 0), len(self._pending)
            lines, self._offsets[path] = read_lines(path, offset, chunk_bytes)
            for line in lines:
                self._take(line)
            if self._offsets[path] - offset >= chunk_bytes:
                newest = max([newest, *(entry.end for entry in self._pending[num_before:])])
                heappush(unread, (newest, path))
            if unread and len(self._pending) > most_entries:
                self._settle(unread[0][0] - LATE_SECONDS)
                most_entries = 2 * len(self._pending) + MIN_ENTRIES

    def _settle(self, until: float) -> None:
        """Add up the entries that begin before this moment; unread lines begin later."""
        self._pending.sort(key=attrgetter("begin", "end"))
        settled = [entry for entry in self._pending if entry.begin < until]
        for entry in settled:
            self._settled.add(entry)
        del self._pending[: len(settled)]

    def _take(self, line: dict[str, Any]) -> None:
        seconds, rank, moment, generation = (line.get(name) for name in ("seconds", "rank", "time", "generation"))
        if not isinstance(seconds, dict) or not isinstance(rank, int) or not isinstance(generation, int):
            return
        if not isinstance(moment, int | float) or not 0.0 <= moment < MAX_MOMENT:
            return
        counted = {
            kind: float(value)
            for kind, value in seconds.items()
            if kind in LEDGER_KINDS and isinstance(value, int | float) and abs(value) < MAX_LINE_SECONDS
        }
        self._generations.setdefault(generation, GenerationBooks()).add(rank, counted)
        ended = line.get("ended")
        begin = moment - max(sum(counted.values()), SHORTEST_SECONDS)
        self._pending.append(_Entry(begin, moment, generation, counted, ended if isinstance(ended, str) else None))


def spread(paths: list[Path], most: int | None) -> list[Path]:
    """Return at most `most` of the nodes' files, evenly spread, always including the first."""
    if most is None or len(paths) <= most:
        return paths
    return [paths[index * len(paths) // most] for index in range(most)]
