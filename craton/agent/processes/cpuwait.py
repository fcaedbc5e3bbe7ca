"""Measure how long a rank could not run since its last progress: no CPU for its threads, or a frozen machine.

Linux counts for every thread how long it was runnable and waited for a CPU (`schedstat`, proc_pid_schedstat(5)), and
adds the wait when the thread gets a CPU. A runnable thread that got none since the last look has waited all the time. A
rank that hangs, is stopped or waits for another rank is not runnable, so nothing is counted; on an idle machine nothing
is counted at all. Threads often take turns, so their waits are added up. At most MAX_SHARE of the observed time counts,
so that a rank that spins forever on a busy machine is detected too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SHARE = 0.9  # of the observed time
LOOK_SECONDS = 0.5  # between two looks at the threads of a rank
LOOK_SHARE = 0.25  # of a rank's limit, before its threads are inspected: most steps end earlier
AGENT_PAUSE_SECONDS = 1.5  # between two calls, which come several times a second: the agent itself did not run


def run_and_wait_ns(task: Path) -> tuple[int, int]:
    """Return how long a thread (a folder of /proc/PID/task) has run, and waited for a CPU. OSError, ValueError if it
    has ended."""
    ran, waited, *_ = (task / "schedstat").read_text().split()
    return int(ran), int(waited)


@dataclass(frozen=True)
class ThreadTimes:
    ran_ns: int
    waited_ns: int
    is_ready: bool  # it runs, or waits for a CPU

    def waited_since(self, before: ThreadTimes | None, seconds: float) -> float:
        """Return the seconds without a CPU since the look `seconds` ago."""
        if before is None:
            return self.waited_ns / 1e9
        if self.is_ready and (self.ran_ns, self.waited_ns) == (before.ran_ns, before.waited_ns):
            return seconds if before.is_ready else 0.0
        return (self.waited_ns - before.waited_ns) / 1e9


class CpuWait:
    """Follows one rank; the agent calls it several times a second."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._asked: float | None = None  # monotonic
        self._progress = -1.0  # the last progress; everything below is counted from it
        self._paused_seconds = 0.0
        self._looked: float | None = None
        self._begun = 0.0
        self._waited_seconds = 0.0
        self._by_thread: dict[str, ThreadTimes] = {}

    def seconds(self, pid: int, progress: float, limit: float, now: float) -> float:
        """Return the seconds it could not run since `progress` (monotonic); `limit`: its hang limit in seconds."""
        pause = now - self._asked if self._asked is not None else 0.0
        self._asked = now
        if progress != self._progress:
            self._progress, self._looked, self._paused_seconds, self._waited_seconds = progress, None, 0.0, 0.0
            pause = min(pause, now - progress)
        if pause > AGENT_PAUSE_SECONDS:
            self._paused_seconds += pause
        if now - progress > LOOK_SHARE * limit and (self._looked is None or now - self._looked >= LOOK_SECONDS):
            self._look(pid, now)
        observed = 0.0 if self._looked is None else self._looked - self._begun
        return self._paused_seconds + min(self._waited_seconds, MAX_SHARE * observed)

    def _look(self, pid: int, now: float) -> None:
        by_thread = dict(self._threads(pid))
        if self._looked is None:
            self._begun = now
        else:
            since = now - self._looked
            self._waited_seconds += sum(
                times.waited_since(self._by_thread.get(thread), since) for thread, times in by_thread.items()
            )
        self._looked, self._by_thread = now, by_thread

    def _threads(self, pid: int) -> Iterator[tuple[str, ThreadTimes]]:
        """Yield the thread times of a process and its descendants."""
        with contextlib.suppress(OSError):  # it has ended
            for task in (self._proc / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    ran, waited = run_and_wait_ns(task)
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    yield task.name, ThreadTimes(ran, waited, state == "R")
                with contextlib.suppress(OSError, ValueError):
                    for child in (task / "children").read_text().split():
                        yield from self._threads(int(child))
