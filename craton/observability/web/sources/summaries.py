"""Summaries of all runs under a root, refreshed by one thread while a page is open.

A run that has ended and did not change is not read again, not even by the next `craton ui`; active runs are read
incrementally. Rows are published as they are read, newest runs first, so that 500 runs never keep a page waiting. Read
errors are shown and retried at the next refresh, and never end the thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.observability.web.sources.caches import Remembered, Schedulers, recall, remember
from craton.observability.web.sources.verdicts import CachedVerdict, Verdicts, agreeing
from craton.orchestration import read_submission
from craton.orchestration.watching import MOVING, glance_at_members, settled_summaries, with_members_sum
from craton.telemetry import MARKERS, RunDirectory, RunSummary, Summarizer, list_runs, read_json
from craton.telemetry.files import names_in

LOOK_SECONDS = 1.5  # between two refreshes
MAX_SHARE = 0.2  # maximum share of time spent on them
WATCHED_SECONDS = 20.0  # after the last request the page counts as closed
MAX_NODES = 16  # whose ledgers are read; all of a wide run would take minutes
KEY_NODES = 8
ASIDE_SECONDS = 0.5  # maximum wait of the next read for a page to be rendered
LOST_AGAIN_SECONDS = 60.0  # refresh of a lost run, which shows the time since its last sign of life
LIVE = {*MOVING, "ready", "restarting", "stuck"}  # states of members that change
EXAMINED = (*MOVING, "failed", "lost")  # states that are diagnosed
_EVALUATION = "craton.ml.evaluation"  # the module of an evaluation's process


@dataclass(frozen=True)
class RunRow:
    """One run in the list; without a summary: not read yet."""

    run: RunDirectory
    summary: RunSummary | None = None
    kind: str = ""
    planned_dollars: float | None = None
    trouble: str = ""  # why it cannot be read
    verdict: CachedVerdict | None = None
    version: int = 0

    @property
    def state(self) -> str:
        if self.summary is not None:
            return self.summary.shown_state
        return "unreadable" if self.trouble else "reading"


@dataclass
class _Known:
    key: tuple[int, ...] | None = None
    summarizer: Summarizer | None = None
    raw: RunSummary | None = None
    kind: str = ""
    planned_dollars: float | None = None
    trouble: str = ""
    read_at: float = float("-inf")


@dataclass
class Summaries:
    """The list of runs. Any thread may call `rows`; its own thread reads."""

    root: Path
    verdicts: Verdicts
    schedulers: Schedulers = field(default_factory=Schedulers)
    version: int = 0
    trouble: str = ""  # why the whole list cannot be read
    _rows: dict[str, RunRow] = field(default_factory=dict)  # newest first
    _known: dict[str, _Known] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _asked_at: float = float("-inf")
    _is_closed: bool = False
    _is_read: bool = False
    _num_asides: int = 0
    _remembered: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def rows(self) -> list[RunRow]:
        """Return all runs read so far, newest first."""
        with self._changed:
            self._asked_at = time.monotonic()
            is_first = self._thread is None
            if is_first and not self._is_closed:
                self._known = {name: _known_from(item) for name, item in recall(self.root).items()}
                self.trouble = self._list()
                self._thread = threading.Thread(target=self._work, name="summaries", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return list(self._rows.values())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Pause reading around work that a user waits for, which would otherwise take twice as long."""
        with self._changed:
            self._num_asides += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_asides -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def refresh(self) -> None:
        """Read all runs once."""
        trouble = self._list()
        with self._changed:
            rows = list(self._rows.values())
        for row in rows:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_asides or self._is_closed, timeout=ASIDE_SECONDS)
                if self._is_closed:
                    return
            state = self._known.setdefault(row.run.name, _Known())
            _read(row.run, state)
            if row.summary is None and state.raw is not None and _is_local(row.run):
                self._publish(row.run, state, state.raw)
            elif row.summary is None and state.trouble:
                self._publish(row.run, state, None)
        raws = [raw for row in rows if (raw := self._known[row.run.name].raw) is not None]
        try:
            settled = {
                settled_summary.path: settled_summary
                for settled_summary in settled_summaries(raws, self.schedulers.standings)
            }
        except Exception as error:  # noqa: BLE001 - without the scheduler, the run's own state is shown
            trouble = trouble or f"cannot query the schedulers of the runs: {_why(error)}"
            settled = {entry.path: entry for entry in raws}
        for row in rows:
            state = self._known[row.run.name]
            self._publish(row.run, state, settled.get(state.raw.path) if state.raw else None)
        self._is_read, self.trouble = True, trouble
        ended = {
            name: remembered for name, state in self._known.items() if (remembered := _to_remember(state)) is not None
        }
        keys = {name: item.key for name, item in ended.items()}
        if keys != self._remembered:
            remember(self.root, ended)
            self._remembered = keys

    def _work(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.refresh()
            except Exception as error:  # noqa: BLE001 - shown until a later refresh succeeds
                self.trouble = f"cannot read the runs in {self.root}: {_why(error)}"
            rest = max(LOOK_SECONDS, (time.monotonic() - began) / MAX_SHARE)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=rest)
                self._changed.wait_for(lambda: self._is_closed or self._is_watched())
                if self._is_closed:
                    return

    def _is_watched(self) -> bool:
        return time.monotonic() - self._asked_at < WATCHED_SECONDS

    def _list(self) -> str:
        """List the runs, so that pages need not wait until all folders were read. Return the error message, if any."""
        try:
            names = {run.name: run for run in list_runs(self.root)}
        except OSError as error:
            return f"cannot list the runs in {self.root}: {_why(error)}"
        with self._changed:
            if list(names) != list(self._rows):
                self.version += 1
                fresh = {name: RunRow(run, version=self.version) for name, run in names.items()}
                self._rows = {name: self._rows.get(name, row) for name, row in fresh.items()}
                self._known = {name: state for name, state in self._known.items() if name in names}
        return ""

    def _publish(self, run: RunDirectory, state: _Known, summary: RunSummary | None) -> None:
        verdict = None
        # Not before all runs were read once: users wait for the list, not for verdicts.
        if self._is_read and summary is not None and summary.state in EXAMINED:
            key = (summary.state, summary.step, summary.updated_at)
            movement = summary.movement
            verdict = self.verdicts.ask(run, key, is_moving=summary.state in MOVING, movement=movement.state)
            verdict = agreeing(verdict, movement)
        with self._changed:
            old = self._rows.get(run.name)
            if old is None:
                return
            new = RunRow(run, summary, state.kind, state.planned_dollars, state.trouble, verdict, old.version)
            if new != old:
                self.version += 1
                self._rows[run.name] = RunRow(
                    run, summary, state.kind, state.planned_dollars, state.trouble, verdict, self.version
                )


def _known_from(remembered: Remembered) -> _Known:
    return _Known(remembered.key, None, remembered.summary, remembered.kind, remembered.planned_dollars)


def _to_remember(state: _Known) -> Remembered | None:
    """Return what to remember of a run that has ended; None for others, which are read again anyway."""
    if state.key is None or state.raw is None or state.raw.state in (*MOVING, "lost"):
        return None
    return Remembered(state.key, state.raw, state.kind, state.planned_dollars)


def _read(run: RunDirectory, state: _Known) -> None:
    """Read a run that is active, or changed since the last read."""
    key = _key(run)
    # Members of a run that has ended may still go on.
    has_live = state.raw is not None and state.raw.members is not None and set(state.raw.members.states) & LIVE
    if state.raw is not None and state.raw.state not in MOVING and key == state.key and not has_live:
        is_fresh = time.monotonic() - state.read_at < LOST_AGAIN_SECONDS
        if state.raw.state != "lost" or is_fresh:
            return
    state.read_at = time.monotonic()
    try:
        if key != state.key:
            plan = read_json(run.plan_path)
            cost = plan.get("cost") if isinstance(plan.get("cost"), dict) else {}
            assert isinstance(cost, dict)
            dollars = plan.get("cost_dollars") or cost.get("cost_dollars")
            state.kind = job_kind(run, plan)
            state.planned_dollars = float(dollars) if isinstance(dollars, int | float) else None
        state.summarizer = state.summarizer or Summarizer(run, MAX_NODES)
        rows = glance_at_members(run, asks_scheduler=False)
        state.raw, state.trouble = with_members_sum(run, state.summarizer.summary(), rows), ""
    except Exception as error:  # noqa: BLE001 - a broken folder must not hide other runs
        state.raw, state.trouble = None, f"cannot read {run.path}: {_why(error)}"
    state.key = key
    if state.raw is None or state.raw.state not in MOVING:
        state.summarizer = None  # frees the run's ledgers


def job_kind(run: RunDirectory, plan: Mapping[str, Any]) -> str:
    """Return the job's kind from its plan; a job without a plan is an evaluation or a command."""
    if plan:
        return str(plan.get("kind") or "")
    command = read_json(run.launch_path).get("command")
    return "eval" if isinstance(command, list) and _EVALUATION in command else "command"


def _is_local(run: RunDirectory) -> bool:
    """Return whether the run has no scheduler to query."""
    try:
        return read_submission(run).on == "local"
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False


def _key(run: RunDirectory) -> tuple[int, ...]:
    """Return a key that changes when an ended run is resumed."""
    paths = [
        run.path / "members" / "status.json",
        run.launch_path,
        run.plan_path,
        run.path / "generations",
        *(run.path / marker for marker in MARKERS),
    ]
    try:
        nodes = names_in(run.path / "heartbeat")[:KEY_NODES]
    except OSError:
        nodes = []
    return tuple(_modified(path) for path in (*paths, *(run.heartbeat_path(node) for node in nodes)))


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _modified(path: Path) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0
