"""Write a node's markers and heartbeat, and retry until the disk accepts them.

Nothing here raises into the agent's loop. A marker or heartbeat that a full, read-only or failing disk refuses is kept
and retried every second, and so are the node's records. The heartbeat reports the reason: its text overwrites the old
text, which needs no disk space. If the run directory is gone, or is another one, nothing is written.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace

from craton.agent.records.records import NodeRecords
from craton.formatting import counted, whole_duration
from craton.telemetry import Marker, RunDirectory
from craton.telemetry.files import storage_problem
from craton.telemetry.node import Heartbeat, touch_heartbeat, write_heartbeat
from craton.telemetry.rank import JUMP_SECONDS, wall_offset


class StateWriter:
    def __init__(self, run: RunDirectory, node: str, records: NodeRecords) -> None:
        self._run, self._node, self._records = run, node, records
        self._identity = directory_identity(run)
        self._marks: list[tuple[Marker, str]] = []  # not set yet, or without their text
        self._beat: Heartbeat | None = None  # as it should be
        self._written: Heartbeat | None = None  # as it is
        self._clock_offset: float | None = None  # of the wall clock in the heartbeat
        self._error: OSError | None = None  # of the last marker or heartbeat
        self._failing_since: float | None = None  # monotonic

    @property
    def is_gone(self) -> bool:
        """Whether the run directory no longer exists, or is another one."""
        return directory_identity(self._run) != self._identity

    @property
    def has_unwritten(self) -> bool:
        return bool(self._marks) or self._written != self._wanted_beat or self._records.waiting_lines > 0

    @property
    def trouble(self) -> str:
        """What is wrong with the disk of the run, or how many lines that has cost; "" if nothing."""
        lost, waiting = self._records.lost_lines, self._records.waiting_lines
        error = self._records.error or self._error
        dropped = f"{counted(lost, 'line')} of the run's records were dropped"
        if error is None:
            return f"{dropped} while its disk accepted none" if lost else ""
        why = storage_problem(self._run.path) or f"{self._run.path} cannot be written ({error.strerror})"
        kept = f"{counted(waiting, 'line')} of the run's records wait in memory" + (f", {dropped}" if lost else "")
        return f"{why}; the run continues, {kept}"

    def has(self, marker: Marker) -> bool:
        """Whether a marker is set, or waits to be."""
        return self._run.has(marker) or any(marker == waiting for waiting, _ in self._marks)

    def mark(self, marker: Marker, text: str = "") -> None:
        self._marks.append((marker, text))
        self._write_marks()

    def beat(self, heartbeat: Heartbeat) -> None:
        self._beat = heartbeat
        self._write_beat()

    def touch(self) -> None:
        """Call every second: refresh the heartbeat and retry what waits."""
        if self.is_gone:
            return
        self._error = None
        self._records.flush()
        self._write_marks()
        self._tell()
        has_jumped = self._clock_offset is not None and abs(wall_offset() - self._clock_offset) > JUMP_SECONDS
        if has_jumped or self._written != self._wanted_beat:
            self._write_beat()
        with contextlib.suppress(OSError):  # e.g. read-only: readers check the process instead
            touch_heartbeat(self._run, self._node, self._clock_offset)

    @property
    def _wanted_beat(self) -> Heartbeat | None:
        missing = self._records.lost_lines + self._records.waiting_lines
        return replace(self._beat, trouble=self.trouble, missing_lines=missing) if self._beat else None

    def _write_marks(self) -> None:
        while self._marks and not self.is_gone:
            marker, text = self._marks[0]
            try:
                self._run.mark(marker, text)
            except OSError as error:
                self._error = error
                return
            del self._marks[0]

    def _write_beat(self) -> None:
        wanted = self._wanted_beat
        if wanted is None or self.is_gone:
            return
        try:
            self._clock_offset = write_heartbeat(self._run, self._node, wanted)
        except OSError as error:
            self._error = error
            return
        self._written = wanted

    def _tell(self) -> None:
        """Report once when the disk starts to refuse writes, and once when it accepts everything again."""
        is_failing = (self._records.error or self._error) is not None
        if is_failing and self._failing_since is None:
            self._failing_since = time.monotonic()
            print(f"craton agent: {self.trouble}", file=sys.stderr, flush=True)
            self._records.event("storage_failed", message=self.trouble)
        elif not is_failing and self._failing_since is not None:
            seconds, self._failing_since = time.monotonic() - self._failing_since, None
            lost = self._records.lost_lines
            dropped = f"{counted(lost, 'line')} dropped"
            text = f"{self._run.path} accepts records again after {whole_duration(seconds)}; {dropped}"
            print(f"craton agent: {text}", file=sys.stderr, flush=True)
            self._records.event("storage_restored", message=text, seconds=seconds, lost_lines=lost)


def directory_identity(run: RunDirectory) -> tuple[int, int] | None:
    """Return the identity of the run directory: another directory in its place is not this run."""
    try:
        status = run.path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
