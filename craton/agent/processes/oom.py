"""Whether the kernel's OOM killer ended a process: by the counter of its own cgroup, else by that of the machine.

The counters do not say which process was killed, and others may have been killed hours ago. So only the last seconds
count, and a cgroup that counts is asked alone: other containers on the machine run out of memory too.
"""

from __future__ import annotations

from pathlib import Path

from craton.limits import cgroup_folders, number_after

LOOK_SECONDS = 2.0
RECENT_SECONDS = 10.0  # a killed process may need seconds to give back its memory
_CGROUP_FILES = ("memory.events", "memory.oom_control")  # of version 2 and 1


class OomWatch:
    """Follows the counter that applies to one process."""

    def __init__(self, pid: int, now: float, root: Path = Path("/")) -> None:
        self._pid, self._root = pid, root
        self._file = self._counter()
        self._seen = [(now, self._count())]  # moment, count; the newest that is not recent comes first

    def look(self, now: float, state: str) -> None:
        """Read the counter, at most every LOOK_SECONDS; the process may have entered another cgroup. `state` is that of
        the process, by the kernel: some kernels show one that has ended (Z, or "") in a cgroup that is not its own."""
        if now - self._seen[-1][0] < LOOK_SECONDS or state in ("Z", ""):
            return
        file = self._counter()
        if file != self._file:
            self._file, self._seen = file, []
        self._seen.append((now, self._count()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.pop(0)

    @property
    def has_killed(self) -> bool:
        """Whether a process was killed in the last seconds that this one may be."""
        return self._count() > self._seen[0][1]

    def _counter(self) -> Path:
        """Return the file that counts."""
        for folder in cgroup_folders("memory", self._pid, self._root):
            for name in _CGROUP_FILES:
                if number_after(folder / name, "oom_kill") is not None:
                    return folder / name
        return self._root / "proc" / "vmstat"

    def _count(self) -> int:
        return number_after(self._file, "oom_kill") or 0
