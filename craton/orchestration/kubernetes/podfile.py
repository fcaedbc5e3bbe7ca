"""`pods.json` in a run directory, written by the first pod: the submission, its run time so far, and a call for the
other pods to answer while the order of ranks is undecided.

The time limit counts only while pods run: a preempted run does not pay for its time in the queue, and the next pod
continues the count. The file is written every 30 s, because a pod may be killed; at most that much time is not counted.
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
    """Count the run time, and stop the run with a checkpoint before Kubernetes ends the pods.

    Kubernetes applies the limit from each pod's own start, and pods do not start together. The first pod counts over
    all its predecessors, any other only for itself. The first to reach the limit stops the run.
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
        """`since` is the pod's start on the clock of `time.monotonic`."""
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
            with contextlib.suppress(OSError):  # the limit holds even on a full disk
                write_pod_file(self._run, self._submission, self._before + time.monotonic() - self._since)


def write_pod_file(run: RunDirectory, submission: str, used: float = 0.0, call: str = "") -> None:
    """Write pods.json, the last file of a new submission: other pods start once it has no call."""
    document = {"submission": submission, "used_seconds": round(used, 3), **({"call": call} if call else {})}
    write_whole(run.path / POD_FILE, json.dumps(document) + "\n")


def submission_of(run: RunDirectory) -> str | None:
    submission = read_json(run.path / POD_FILE).get("submission")
    return submission if isinstance(submission, str) else None


def call_of(run: RunDirectory) -> str:
    """Return the open call for the pods; empty once their order is decided."""
    return str(read_json(run.path / POD_FILE).get("call") or "")


def used_seconds(run: RunDirectory) -> float:
    return float(read_json(run.path / POD_FILE).get("used_seconds") or 0.0)


def write_whole(path: Path, text: str) -> None:
    """Write atomically: another pod sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
