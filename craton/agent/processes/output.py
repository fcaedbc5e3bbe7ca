"""Copy the output of a job's own command to its log.

A program that prints to a file on a full disk gets an error from `print` and usually dies of it. So its standard output
is a pipe: a thread of the agent reads it and writes the log, and text that the disk refuses waits in bounded memory.
Ranks of the training loop need no pipe: their own streams do the same (`protect_output`).
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
TAIL_BYTES = 48 << 10  # of the newest text, for error messages
DRAIN_SECONDS = 1.0  # to drain the pipe of a process that has ended


class CommandOutput:
    """The pipe of one process; `writing` is the end that the process prints to and the caller closes."""

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
        """Bytes that are not on disk yet."""
        return self._file.waiting_bytes

    def flush(self) -> bool:
        """Retry what waits; True, and close the log, once all output of an ended process is written."""
        self._file.write(b"")
        is_over = not self._thread.is_alive() and not self._file.waiting_bytes
        if is_over:
            self._log.close()
        return is_over

    def tail_text(self) -> str:
        """Return the newest text, including what is not on disk yet."""
        return self._tail.decode(errors="replace")

    def end(self) -> None:
        """Drain the pipe of an ended process, unless another process still holds it open."""
        self._thread.join(DRAIN_SECONDS)

    def _copy(self) -> None:
        while data := os.read(self._reading, READ_BYTES):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._file.write(data)
        os.close(self._reading)
