"""A process and the processes that it started."""

from __future__ import annotations

import contextlib
from pathlib import Path

MAX_PROCESSES = 16  # of a tree: enough for the workers of a rank


def process_tree(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return a process and its descendants, at most MAX_PROCESSES; threads other than the first rarely start any."""
    processes = [pid]
    for process in processes:  # grows by the children
        with contextlib.suppress(OSError, ValueError):  # it has ended
            children = (proc / f"{process}/task/{process}/children").read_text().split()
            processes += [int(child) for child in children[: MAX_PROCESSES - len(processes)]]
    return processes
