"""What a job's own command prints, on its way into its log.

A program that prints to a file on a full disk gets an error from `print`, and mostly dies of it. So its standard output
is a pipe: a thread of the agent reads it and writes the log, where text that the disk does not take waits in bounded
memory. Ranks that Craton itself runs need no pipe: their own streams do the same (`protect_output`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from typing import BinaryIO

from craton.telemetry.files import SafeOutput

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 16
TAIL_BYTES = 16 << 10  # of the newest text, for the reason of a failure
DRAIN_SECONDS = 1.0  # for what is in the pipe of a process that has ended


class CommandOutput:
    """The pipe of one process; `writing` is the end that the process prints to, and the caller closes."""

    def __init__(self, log: BinaryIO) -> None:
        self._log, self._file = log, SafeOutput(log.fileno())
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError, AttributeError):  # an unprivileged user has a limited amount of pipe memory
            fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """That the disk has not taken yet."""
        return self._file.waiting_bytes

    def flush(self) -> bool:
        """Another try for what waits; True when all that will ever be printed is in the log, which is closed then."""
        self._file.write(b"")
        is_over = not self._thread.is_alive() and not self._file.waiting_bytes
        if is_over:
            self._log.close()
        return is_over

    def tail_lines(self) -> list[str]:
        """The newest lines, also of those that no disk has taken."""
        return self._tail.decode(errors="replace").splitlines()

    def end(self) -> None:
        """The process has ended: takes what is left in the pipe, unless somebody else still holds it."""
        self._thread.join(DRAIN_SECONDS)

    def _copy(self) -> None:
        while data := os.read(self._reading, READ_BYTES):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._file.write(data)
        os.close(self._reading)
