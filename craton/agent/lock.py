"""One agent per node: a lock in the run directory that the kernel releases when its process ends."""

from __future__ import annotations

import fcntl
import os
import sys

from craton.telemetry import RunDirectory


class NodeLock:
    def __init__(self, run: RunDirectory, node: str) -> None:
        self._path = run.heartbeat_path(f".{node}.lock")
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock; False if another agent of this node is alive. Without file locks, warn and continue."""
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            print(f"craton agent: cannot lock {self._path} ({error.strerror}); continuing without it", file=sys.stderr)
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
