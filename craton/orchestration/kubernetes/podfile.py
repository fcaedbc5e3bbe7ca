"""`pods.json` of a run directory, which its first pod writes: the submission that it is of, and how long that has run.

By it the time limit counts while the run runs: one that was preempted does not pay for its time in the queue, and the
next pod goes on counting. It is written now and then, for a pod may be killed: that much, at most, is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path

from craton.telemetry import RunDirectory, read_json

POD_FILE = "pods.json"
KEEP_SECONDS = 30.0
REASON = "the time limit of the job (run.time_limit)"


class TimeLimit:
    """Counts while it is open, and stops the run in time: with a checkpoint, before the pods are ended."""

    def __init__(self, run: RunDirectory, submission: str, seconds: float | None) -> None:
        self._run, self._submission, self._seconds = run, submission, seconds
        self._before = used_seconds(run)
        self._since = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._count, name="time-limit", daemon=True)

    def __enter__(self) -> TimeLimit:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._seconds is not None:
            self._thread.join()

    def _count(self) -> None:
        assert self._seconds is not None
        is_over = False
        while not is_over:
            used = self._before + time.monotonic() - self._since
            is_over = used >= self._seconds
            if is_over:
                self._run.mark("STOP", REASON)
            elif self._closing.wait(min(KEEP_SECONDS, self._seconds - used)):
                is_over = True
            with contextlib.suppress(OSError):  # a full disk is no reason to forget the limit
                write_pod_file(self._run, self._submission, self._before + time.monotonic() - self._since)


def write_pod_file(run: RunDirectory, submission: str, used: float = 0.0) -> None:
    """The last thing that is written for a new submission: other pods begin when it is there."""
    document = {"submission": submission, "used_seconds": round(used, 3)}
    write_whole(run.path / POD_FILE, json.dumps(document) + "\n")


def submission_of(run: RunDirectory) -> str | None:
    found = read_json(run.path / POD_FILE).get("submission")
    return found if isinstance(found, str) else None


def used_seconds(run: RunDirectory) -> float:
    return float(read_json(run.path / POD_FILE).get("used_seconds") or 0.0)


def write_whole(path: Path, text: str) -> None:
    """So that another pod sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
