"""Caches of the page: expensive values, answers of other servers, scheduler states of runs, and summaries of ended
runs.

`Cached` recomputes a value periodically. `Background` queries another server in a thread, so that a hung one blocks no
page. `Schedulers` shares answers between the list and all open pages. `recall` and `remember` keep summaries from one
`craton ui` to the next, in one file per folder of runs in the user's cache: a broken or unwritable file only costs the
time to read the runs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from craton.infrastructure.storage import cache_root
from craton.orchestration import Standing
from craton.orchestration.watching import standings_of
from craton.telemetry import RunDirectory, RunSummary
from craton.telemetry.files import read_regular
from craton.telemetry.members import members_sum_of

T = TypeVar("T")
MAX_SHARE = 0.1  # maximum share of time spent on computing one value
FIRST_SECONDS = 0.1  # wait of the first caller, so that a fast answer is in the page
FRESH_SECONDS = 5.0  # limits the load on schedulers
FIELDS = [field.name for field in fields(RunSummary)]  # may differ between versions of Craton


class Cached(Generic[T]):
    """Recompute a value when it is `seconds` old, or later if computing it is slow. Other threads get the old value
    meanwhile."""

    def __init__(self, make: Callable[[], T], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._lock = threading.Lock()
        self._value: tuple[T] | None = None
        self._due = float("-inf")

    def get(self) -> T:
        value = self._value
        if value is not None and time.monotonic() < self._due:
            return value[0]
        if not self._lock.acquire(blocking=value is None):
            assert value is not None
            return value[0]
        try:
            if self._value is None or time.monotonic() >= self._due:
                began = time.monotonic()
                self._value = (self._make(),)
                ended = time.monotonic()
                self._due = ended + max(self._seconds, (ended - began) / MAX_SHARE)
            return self._value[0]
        finally:
            self._lock.release()


class Background(Generic[T]):
    """Return the last value and refresh it when it is `seconds` old. `late` is returned before the first value, and
    when an answer takes longer than `deadline_seconds`. At most one query is in flight."""

    def __init__(self, make: Callable[[], T], seconds: float, late: T, deadline_seconds: float) -> None:
        self._make, self._seconds, self._late, self._deadline = make, seconds, late, deadline_seconds
        self._changed = threading.Condition()
        self._value: tuple[T] | None = None
        self._asked_at = float("-inf")
        self._is_asking = False

    def get(self, wait_seconds: float = FIRST_SECONDS) -> T:
        """Return at once, except for a short wait for the first value."""
        with self._changed:
            now = time.monotonic()
            if not self._is_asking and now - self._asked_at >= self._seconds:
                self._is_asking, self._asked_at = True, now
                threading.Thread(target=self._ask, name="background", daemon=True).start()
            if self._value is None:
                self._changed.wait_for(lambda: self._value is not None, timeout=wait_seconds)
            is_late = self._is_asking and time.monotonic() - self._asked_at > self._deadline
            return self._late if self._value is None or is_late else self._value[0]

    def _ask(self) -> None:
        value = None
        try:
            value = (self._make(),)
        finally:
            with self._changed:
                self._is_asking = False
                self._value = value or self._value
                self._changed.notify_all()


class Schedulers:
    """Cache of `standings`: recent answers are reused, and concurrent threads wait for one answer."""

    def __init__(self, ask: Callable[[Iterable[RunDirectory]], dict[str, Standing]] = standings_of) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._said: dict[Path, tuple[float, Standing]] = {}

    def standings(self, runs: Iterable[RunDirectory]) -> dict[str, Standing]:
        """Return run name → standing."""
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


@dataclass(frozen=True)
class Remembered:
    """The summary of a run at the state `key`."""

    key: tuple[int, ...]
    summary: RunSummary
    kind: str
    planned_dollars: float | None


def recall(root: Path) -> dict[str, Remembered]:
    """Return run name → remembered summary."""
    try:
        document = json.loads(read_regular(_path(root)))
        if document["fields"] != FIELDS or document["root"] != str(root):
            return {}
        return {name: _from_json(item) for name, item in document["runs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def remember(root: Path, runs: Mapping[str, Remembered]) -> None:
    """Replace the remembered summaries of this folder."""
    path = _path(root)
    document = {"fields": FIELDS, "root": str(root), "runs": {name: _to_json(item) for name, item in runs.items()}}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document), encoding="utf-8")
        os.replace(partial, path)
    except OSError:  # a full disk only costs the time to read the runs again
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _path(root: Path) -> Path:
    name = hashlib.blake2b(str(root).encode(), digest_size=8).hexdigest()
    return cache_root() / "page" / f"{name}.json"


def _to_json(run: Remembered) -> dict[str, Any]:
    summary = {**asdict(run.summary), "path": str(run.summary.path)}
    del summary["movement"]  # of a run that has ended
    return {"key": run.key, "summary": summary, "kind": run.kind, "planned_dollars": run.planned_dollars}


def _from_json(document: Mapping[str, Any]) -> Remembered:
    summary = document["summary"]
    members = members_sum_of(summary["members"])
    return Remembered(
        key=tuple(document["key"]),
        summary=RunSummary(**{**summary, "path": Path(summary["path"]), "members": members}),
        kind=document["kind"],
        planned_dollars=document["planned_dollars"],
    )
