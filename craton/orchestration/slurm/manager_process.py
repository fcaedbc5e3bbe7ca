"""The member manager of a run on Slurm, seen from the batch program, which starts and restarts it.

An agent could not: its image has no Slurm tools, and Slurm kills what an ended step leaves. The manager is a process of
the batch step, so it ends with the job.
"""

from __future__ import annotations

import contextlib
import subprocess
import time

from craton.agent.processes import how_ended, open_log
from craton.telemetry import RunDirectory

FIRST_PAUSE_SECONDS = 0.5  # before the first restart; doubled for each further one
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a manager that lived this long is restarted without a longer pause
LOOK_SECONDS = 0.2
LOG = "members.log"


class ManagerOfBatch:
    """Keeps the member manager alive; does nothing for a run without members."""

    def __init__(self, run: RunDirectory, command: list[str]) -> None:
        self._run, self._command = run, command
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._next_start = self._pause = 0.0
        self._has_ended = not command  # it has done its work, or there is none

    def tend(self) -> str:
        """Start the manager if it does not live; return how the last one ended if that was not by itself."""
        now = time.monotonic()
        if self._has_ended or now < self._next_start:
            return ""
        if self._process is None:
            self._start(now)
            return ""
        code = self._process.poll()
        if code is None:
            return ""
        self._process = None
        is_over = any(self._run.has(marker) for marker in ("STOP", "DONE", "FATAL"))
        self._has_ended = code == 0 and is_over
        self._pause = 0.0 if now - self._began > STEADY_SECONDS else self._pause
        self._pause = min(MAX_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))
        self._next_start = now + self._pause
        return "" if code == 0 else f"the member manager {how_ended(code)}; starting it again"

    def wait(self, deadline: float) -> bool:
        """Keep the manager of an ended run alive until it has stopped the members; False at the deadline."""
        while not self._has_ended and time.monotonic() < deadline:
            self.tend()
            time.sleep(LOOK_SECONDS)
        return self._has_ended

    def end(self) -> None:
        """Kill the manager, which must not restart members of a job that ends."""
        self._has_ended = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, now: float) -> None:
        with open_log(self._run.path / "logs" / LOG) as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._began = now
