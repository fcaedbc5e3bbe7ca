"""A process, the processes that it started, and their threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
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


def working_process(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the process that does the work of a command: below shells and launchers, which have one child each."""
    for _ in range(MAX_PROCESSES):
        try:
            children = (proc / f"{pid}/task/{pid}/children").read_text().split()
        except OSError:
            break
        if len(children) != 1:
            break
        pid = int(children[0])
    return pid


def threads_of(processes: Sequence[int], proc: Path = Path("/proc")) -> list[Path]:
    """Return the folders of the threads of these processes: the first of each process before all others."""
    firsts, others = [], []
    for process in processes:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            names = sorted(os.listdir(proc / f"{process}/task"), key=int)
            folders = [proc / f"{process}/task/{name}" for name in names]
            firsts += folders[:1]
            others += folders[1:]
    return [*firsts, *others]
