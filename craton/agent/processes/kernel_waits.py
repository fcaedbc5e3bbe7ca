"""How much of the time the threads of a rank wait in the kernel, for files or memory, or are stopped by a signal; and
in what its main thread sleeps.

Linux keeps no account of it by default, so the agent looks at the threads a few times a second. A thread in an
uninterruptible sleep (state D) waits for a disk, a network file system or a page of memory; the kernel function that it
sleeps in (`wchan`, proc_pid_wchan(5)) tells which.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path

from craton.agent.processes.tree import process_tree, threads_of, working_process
from craton.telemetry.node import FROZEN, WAITS_FOR_MEMORY

LOOK_SECONDS = 0.3  # between two looks, at least
WINDOW_SECONDS = 8.0
TREE_SECONDS = 4.0  # between two looks for child processes
MAX_THREADS = 32  # of all processes of a rank
MIN_LOOKS = 5  # fewer give no share
_OTHER = re.compile(rf"{FROZEN.pattern}|ptrace|signal_stop|vfork|kernel_clone")  # not for files or memory


class KernelWaits:
    """Follows one process and its children; for another process all looks restart."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._pid = 0
        # Moment, waits for files, waits for memory, stopped by a signal.
        self._looks: deque[tuple[float, bool, bool, bool]] = deque()
        self._channels: deque[str] = deque(maxlen=MIN_LOOKS)  # of the main thread; "": it does not sleep
        self._tree: list[int] = []
        self._tree_at = 0.0

    def look(self, pid: int, now: float) -> None:
        """Look at the threads, at most every LOOK_SECONDS."""
        if pid != self._pid:
            self._pid, self._tree, self._tree_at = pid, [], 0.0
            self._looks.clear()
            self._channels.clear()
        elif self._looks and now - self._looks[-1][0] < LOOK_SECONDS:
            return
        if not self._tree or now - self._tree_at >= TREE_SECONDS:
            self._tree, self._tree_at = process_tree(pid, self._proc), now
        self._channels.append(self._main_channel(pid))
        channels = self._asleep()
        memory = [channel for channel in channels if WAITS_FOR_MEMORY.search(channel)]
        self._looks.append((now, len(memory) < len(channels), bool(memory), self._is_stopped(pid)))
        while len(self._looks) > MIN_LOOKS and now - self._looks[0][0] > WINDOW_SECONDS:
            self._looks.popleft()

    @property
    def file_share(self) -> float:
        """The share of the looks in which a thread waited for a file or a disk."""
        return self._share([files for _, files, _, _ in self._looks])

    @property
    def sleeps_in(self) -> str:
        """The kernel function in which its main thread has slept in all newest looks; "": it works, or moves."""
        is_known = len(self._channels) == MIN_LOOKS and len(set(self._channels)) == 1
        return self._channels[0] if is_known else ""

    @property
    def memory_share(self) -> float:
        """The share of the looks in which a thread waited for memory."""
        return self._share([memory for _, _, memory, _ in self._looks])

    @property
    def stopped_share(self) -> float:
        """The share of the looks in which a signal had stopped it."""
        return self._share([stopped for _, _, _, stopped in self._looks])

    def _main_channel(self, pid: int) -> str:
        worker = working_process(pid, self._proc)
        task = self._proc / f"{worker}/task/{worker}"
        try:
            channel = _channel(task) if _state(task) in ("S", "D") else ""
        except (OSError, IndexError):
            return ""
        return "" if channel == "0" else channel

    def _is_stopped(self, pid: int) -> bool:
        try:
            return _state(self._proc / f"{pid}") == "T"
        except (OSError, IndexError):
            return False

    @staticmethod
    def _share(looks: list[bool]) -> float:
        return round(sum(looks) / len(looks), 3) if len(looks) >= MIN_LOOKS else 0.0

    def _asleep(self) -> list[str]:
        """Return the kernel functions of the threads that sleep uninterruptibly; "" where it is not known."""
        channels = []
        for task in threads_of(self._tree, self._proc)[:MAX_THREADS]:
            with contextlib.suppress(OSError, IndexError):
                if _state(task) != "D":
                    continue
                channel = _channel(task)
                if not _OTHER.search(channel):
                    channels.append(channel)
        return channels


def _state(task: Path) -> str:
    """Return the state of a process or thread, by the kernel. OSError, IndexError if it has ended."""
    return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def _channel(task: Path) -> str:
    try:
        return (task / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
