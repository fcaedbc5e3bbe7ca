"""The processes below one: what they use, and how to end all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

STOP_SECONDS = 0.2


def children(pid: int) -> list[int]:
    """Return the direct children of a single-threaded process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()]
    except (OSError, ValueError):
        return []


def descendants(pid: int) -> list[int]:
    """Return all processes below one, those that its threads started included."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            with contextlib.suppress(OSError, ValueError):
                below = [int(child) for child in Path(f"/proc/{parent}/task/{thread}/children").read_bytes().split()]
                found += below
                waiting += below
    return found


def memory_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))
    except (OSError, ValueError, IndexError):
        return 0


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """End everything below a process. Each is stopped before any is killed, so that none can start another."""
    deadline = time.monotonic() + STOP_SECONDS
    stopped: set[int] = set()
    while (new := set(descendants(pid)) - stopped) and time.monotonic() < deadline:
        for descendant in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGSTOP)
        stopped |= new
    for descendant in stopped | set(descendants(pid)):
        kill(descendant)
