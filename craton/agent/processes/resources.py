"""CPUs and memory that a rank's process may use: affinity, priority, limits of its cgroups, other processes.

A rank that others wait for is often limited: by a CPU quota of its container, by an affinity mask that puts several
ranks on one core, by a lower priority. Its agent reads that from the kernel (sched(7), cgroups(7),
proc_pid_schedstat(5)), so that it is known for every node, wherever the diagnosis runs.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.agent.processes.cpuwait import run_and_wait_ns
from craton.agent.processes.kernel_waits import KernelWaits
from craton.agent.processes.step_work import StepWork
from craton.agent.processes.tree import process_tree, threads_of
from craton.limits import UNLIMITED_BYTES, cgroup_folders, cgroup_quota, number_in, numbers_in
from craton.telemetry.node import ProcessResources

WINDOW_SECONDS = 4.0  # shares are of at least so much time, once the rank has run for so long
MAX_THREADS = 64  # of a rank and its children, whose times are read
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
IDLE_SHARE = 0.05  # of a CPU: less is a process that waits
IDLE_LOOK_SECONDS = 2.0  # between two looks at that: a process that waits wakes up now and then
WANTED_SHARE = 0.3  # of a CPU: a process that asks for less is not held up by waiting for it
READ_SECONDS = 1.5  # an agent with many ranks has other things to do
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")  # of memory.stat
MIN_PERIODS = 10  # of a quota, in which a share means something: they count only while the cgroup runs
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Quota:
    """The CPU quota of a cgroup, and how much of it was used up."""

    cpus: float  # 0: none
    periods: int
    throttled: int  # periods in which it was used up
    throttled_seconds: float  # on all CPUs together

    @classmethod
    def of(cls, folder: Path) -> _Quota:
        numbers = numbers_in(folder / "cpu.stat")
        seconds = numbers.get("throttled_usec", 0) / 1e6 + numbers.get("throttled_time", 0) / 1e9  # version 2, 1
        periods, throttled = numbers.get("nr_periods", 0), numbers.get("nr_throttled", 0)
        return cls(cgroup_quota(folder) or 0.0, periods, throttled, seconds)


@dataclass(frozen=True)
class _Counters:
    moment: float  # monotonic
    threads: Mapping[Path, tuple[int, int]]  # nanoseconds that each ran, and was runnable without a CPU
    used_seconds: float  # of CPU time, with its children
    quotas: Mapping[Path, _Quota]  # of cgroups
    refaults: int  # of its cgroups with a memory limit: pages of files that were dropped and needed again


class ResourceReader:
    """Follows one process and its children; for another one all counts restart."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._pid = 0
        self._seen: list[_Counters] = []  # the oldest that a share is taken from first
        self._busy_at = 0.0  # monotonic: when it last used a CPU
        self._judged: _Counters | None = None
        self._last = ProcessResources()
        self._waits = KernelWaits(root / "proc")
        self._work = StepWork()

    @property
    def sleeps_in(self) -> str:
        """The kernel function in which its main thread sleeps, by the newest looks."""
        return self._waits.sleeps_in

    def look(self, pid: int, now: float) -> None:
        """Look in what its threads wait; called between two reads."""
        self._waits.look(pid, now)

    def read(self, pid: int, now: float, step: int | None = None) -> ProcessResources:
        """Return what the process may use and uses at the monotonic second `now`; read at most every READ_SECONDS.
        `step` is the last one it has begun."""
        if pid != self._pid:
            self._pid, self._seen, self._busy_at, self._judged, self._work = pid, [], now, None, StepWork()
        elif now - self._seen[-1].moment < READ_SECONDS:
            return self._last
        self._last = self._read(pid, now, step)
        return self._last

    def _read(self, pid: int, now: float, step: int | None) -> ProcessResources:
        counters = self._counters(pid, now)
        if step:
            self._work.add(now, step, counters.used_seconds)
        while len(self._seen) > 1 and now - self._seen[1].moment >= WINDOW_SECONDS:
            self._seen.pop(0)
        first = self._seen[0] if self._seen else counters
        self._judge_idle(counters)
        self._seen.append(counters)
        ran, waited = _ran_and_waited(first, counters)
        wants_cpu = ran + waited > WANTED_SHARE * 1e9 * (now - first.moment)
        seconds = now - first.moment
        memory_share, memory_limit = self._memory(pid)
        return ProcessResources(
            cpus=_allowed_cpus(pid),
            node_cpus=os.cpu_count() or 0,
            quota_cpus=self._quota(pid),
            niceness=self._niceness(pid),
            waited_share=round(waited / (ran + waited), 3) if wants_cpu and ran >= 0 and waited > 0 else 0.0,
            throttled_share=round(_throttled_share(first, counters), 3),
            throttled_time_share=round(_throttled_time_share(first, counters), 3),
            memory_share=round(memory_share, 3),
            memory_limit_bytes=memory_limit,
            memory_bytes=self._resident(pid),
            idle_seconds=round(now - self._busy_at, 1),
            wanted_cpus=round(max(0, ran + waited) / seconds / 1e9, 2) if seconds > 0 else 0.0,
            file_wait_share=self._waits.file_share,
            memory_wait_share=self._waits.memory_share,
            stopped_share=self._waits.stopped_share,
            sleeps_in=self._waits.sleeps_in,
            refaults_per_second=round(max(0, counters.refaults - first.refaults) / seconds, 1) if seconds else 0.0,
            step_cpu_seconds=round(self._work.recent_seconds, 6),
            usual_step_cpu_seconds=round(self._work.usual_seconds, 6),
        )

    def _judge_idle(self, counters: _Counters) -> None:
        last = self._judged or counters
        seconds = counters.moment - last.moment
        if self._judged is not None and seconds < IDLE_LOOK_SECONDS:
            return
        self._judged = counters
        if not 0 <= counters.used_seconds - last.used_seconds <= IDLE_SHARE * seconds:
            self._busy_at = counters.moment

    def _counters(self, pid: int, now: float) -> _Counters:
        processes = process_tree(pid, self._root / "proc")
        threads = {}
        for task in threads_of(processes, self._root / "proc")[:MAX_THREADS]:
            with contextlib.suppress(OSError, ValueError):
                threads[task] = run_and_wait_ns(task)
        folders = {folder for process in processes for folder in cgroup_folders("cpu", process, self._root)}
        quotas = {folder: _Quota.of(folder) for folder in folders}
        return _Counters(now, threads, self._used(processes), quotas, self._refaults(pid))

    def _refaults(self, pid: int) -> int:
        """Return how many pages of files came back from disk after a memory limit had forced them out."""
        for folder in cgroup_folders("memory", pid, self._root):
            limit = number_in(folder / "memory.max") or number_in(folder / "memory.limit_in_bytes") or 0
            if 0 < limit < UNLIMITED_BYTES:
                numbers = numbers_in(folder / "memory.stat")
                return max(numbers.get(f"{prefix}workingset_refault_file", 0) for prefix in ("", "total_"))
        return 0

    def _used(self, processes: Sequence[int]) -> float:
        """Return the CPU seconds of these processes."""
        used = 0.0
        for process in processes:
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (self._root / f"proc/{process}/stat").read_text(errors="replace")
                fields = text.rpartition(")")[2].split()
                used += sum(map(int, fields[11:15])) / TICKS  # its own, and those of children that have ended
        return used

    def _quota(self, pid: int) -> float:
        quotas = [cgroup_quota(folder) for folder in cgroup_folders("cpu", pid, self._root)]
        return min((quota for quota in quotas if quota is not None), default=0.0)

    def _niceness(self, pid: int) -> int:
        try:
            return int((self._root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])
        except (OSError, IndexError, ValueError):
            return 0

    def _resident(self, pid: int) -> int:
        try:
            return int((self._root / f"proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except (OSError, IndexError, ValueError):
            return 0

    def _memory(self, pid: int) -> tuple[float, int]:
        """Return the share of the fullest cgroup's limit that cannot be reclaimed, and that limit; 0, 0: no limit."""
        fullest = (0.0, 0)
        for folder in cgroup_folders("memory", pid, self._root):
            limit = number_in(folder / "memory.max") or number_in(folder / "memory.limit_in_bytes") or 0
            used = number_in(folder / "memory.current") or number_in(folder / "memory.usage_in_bytes") or 0
            if not 0 < limit < UNLIMITED_BYTES:
                continue
            prefix = "" if (folder / "memory.current").exists() else "total_"  # version 1: with the cgroups below it
            numbers = numbers_in(folder / "memory.stat")
            cached = sum(numbers.get(f"{prefix}{name}", 0) for name in RECLAIMABLE)
            fullest = max(fullest, (max(0, used - cached) / limit, limit))
        return fullest


def _ran_and_waited(before: _Counters, now: _Counters) -> tuple[int, int]:
    """Return the nanoseconds of the threads that were there before: others bring the times of their whole lives."""
    both = [(before.threads[task], times) for task, times in now.threads.items() if task in before.threads]
    return sum(new[0] - old[0] for old, new in both), sum(new[1] - old[1] for old, new in both)


def _throttled_share(before: _Counters, now: _Counters) -> float:
    """Return the share of throttled periods of the cgroup that is throttled most: of the rank, or of a child."""
    shares = [
        (quota.throttled - old.throttled) / (quota.periods - old.periods)
        for folder, quota in now.quotas.items()
        if (old := before.quotas.get(folder)) is not None and quota.periods - old.periods >= MIN_PERIODS
    ]
    return max(shares, default=0.0)


def _throttled_time_share(before: _Counters, now: _Counters) -> float:
    """Return the share of the time that the quota takes from the CPUs of the cgroup that loses most."""
    seconds = now.moment - before.moment
    shares = [
        (quota.throttled_seconds - old.throttled_seconds) / (seconds * max(1, math.ceil(quota.cpus)))
        for folder, quota in now.quotas.items()
        if (old := before.quotas.get(folder)) is not None and seconds > 0
    ]
    return min(1.0, max(shares, default=0.0))


def _allowed_cpus(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except (OSError, AttributeError):
        return 0
