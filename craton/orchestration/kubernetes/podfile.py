"""`pods.json` of a run directory, which its first pod writes: the submission that it is of, how long that has run, and
a call for the other pods to answer while their order is not decided.

By it the time limit counts while pods run: a run that was preempted does not pay for its time in the queue, and the
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
    """Counts while it is open, and stops the run in time: with a checkpoint, before the pods are ended.

    Kubernetes ends every pod that long after *its* start, and pods do not start together: the first pod counts over all
    pods that took its place, any other for itself alone. Whose time is over first stops the run.
    """

    def __init__(
        self,
        run: RunDirectory,
        submission: str,
        seconds: float | None,
        *,
        since: float | None = None,
        is_first: bool = True,
    ) -> None:
        """`since` is when the pod began, on the clock of `time.monotonic`."""
        self._run, self._submission, self._seconds = run, submission, seconds
        self._is_first = is_first
        self._before = used_seconds(run) if is_first else 0.0
        self._since = time.monotonic() if since is None else since
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
            if not self._is_first:
                continue
            with contextlib.suppress(OSError):  # a full disk is no reason to forget the limit
                write_pod_file(self._run, self._submission, self._before + time.monotonic() - self._since)


def write_pod_file(run: RunDirectory, submission: str, used: float = 0.0, call: str = "") -> None:
    """The last thing that is written for a new submission: other pods begin when it is there without a call."""
    document = {"submission": submission, "used_seconds": round(used, 3), **({"call": call} if call else {})}
    write_whole(run.path / POD_FILE, json.dumps(document) + "\n")


def submission_of(run: RunDirectory) -> str | None:
    submission = read_json(run.path / POD_FILE).get("submission")
    return submission if isinstance(submission, str) else None


def call_of(run: RunDirectory) -> str:
    """What the pods are to answer; "": their order is decided."""
    return str(read_json(run.path / POD_FILE).get("call") or "")


def used_seconds(run: RunDirectory) -> float:
    return float(read_json(run.path / POD_FILE).get("used_seconds") or 0.0)


def write_whole(path: Path, text: str) -> None:
    """So that another pod sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
