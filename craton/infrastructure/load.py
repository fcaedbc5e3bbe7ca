"""How busy this machine is: what else runs, and time that the hypervisor gave to other machines.

Reading takes half a second. Linux shares cores fairly, by default between sessions rather than processes
(sched_autogroup, sched(7)): ten busy processes of one terminal get as much as one rank, which has its own session.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from craton.formatting import percent

SAMPLES = 10
SAMPLE_SECONDS = 0.05
QUIET = 0.15  # others that run, or share of stolen time, below which the machine counts as idle
MAX_STEAL = 0.9


@dataclass(frozen=True)
class MachineLoad:
    """The load of the moment."""

    runnable: float = 0.0  # others that run or could run, mean of the samples: sessions, or threads
    steal_share: float = 0.0  # of all CPU time: the hypervisor gave it to other machines
    is_per_session: bool = True  # cores are shared between sessions, not processes

    @property
    def is_busy(self) -> bool:
        return self.runnable >= QUIET or self.steal_share >= QUIET

    def slowdown(self, ranks: int, threads: int, cores: int) -> float:
        """Return wall time over CPU time of `ranks` that run `threads` each and share `cores` with everything else. A
        rank with several threads divides the share of its session among them."""
        others = self.runnable * (threads if self.is_per_session else 1)
        return max(1.0, (others + ranks * threads) / cores) / (1.0 - min(self.steal_share, MAX_STEAL))


IDLE = MachineLoad()


@dataclass(frozen=True)
class CpuTicks:
    """Clock ticks of all CPUs since the machine booted (proc_stat(5))."""

    total: int
    steal: int


def current_load(root: Path = Path("/")) -> MachineLoad:
    """Return the load of this machine; IDLE where /proc does not say."""
    proc = root / "proc"
    try:
        is_per_session = shares_by_session(root)
        before = cpu_ticks((proc / "stat").read_text())
        samples = []
        for _ in range(SAMPLES):
            sessions = runnable_sessions(proc)
            samples.append(len(set(sessions)) if is_per_session else len(sessions))
            time.sleep(SAMPLE_SECONDS)
        after = cpu_ticks((proc / "stat").read_text())
    except (OSError, ValueError):
        return IDLE
    return MachineLoad(sum(samples) / SAMPLES, steal_share(before, after), is_per_session)


def shares_by_session(root: Path) -> bool:
    """Whether the kernel shares cores between sessions. A CPU cgroup other than the root overrides that (sched(7)):
    containers and most services have one, and share between threads."""
    switch = root / "proc" / "sys" / "kernel" / "sched_autogroup_enabled"
    if not switch.is_file() or switch.read_text().strip() != "1":
        return False
    if (root / "sys" / "fs" / "cgroup" / "cpu.weight").exists():  # which the root has not: this is a container
        return False
    groups = [line.split(":", 2) for line in (root / "proc" / "self" / "cgroup").read_text().splitlines()]
    of_cpu = [path for _, controllers, path in groups if not controllers or "cpu" in controllers.split(",")]
    return all(path == "/" for path in of_cpu)


def runnable_sessions(proc: Path) -> list[int]:
    """Return the session of every runnable thread except those of this process."""
    found = []
    for process in proc.glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        for thread in process.glob("task/[0-9]*"):
            try:
                state, session = state_and_session((thread / "stat").read_text())
            except (OSError, ValueError):  # it has ended
                continue
            if state == "R" and session:  # threads of the kernel have session 0
                found.append(session)
    return found


def state_and_session(stat: str) -> tuple[str, int]:
    """Parse /proc/PID/stat: the state and the session; the name before them may contain spaces and parentheses."""
    state, _parent, _group, session, *_ = stat.rpartition(")")[2].split()
    return state, int(session)


def cpu_ticks(stat: str) -> CpuTicks:
    """Parse the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, and guest times that
    user and nice already contain."""
    head, *fields = stat.split("\n", 1)[0].split() or [""]
    if head != "cpu" or len(fields) < 8:
        raise ValueError(f"not the first line of /proc/stat: {stat[:40]!r}")
    numbers = [int(field) for field in fields[:8]]
    return CpuTicks(sum(numbers), numbers[7])


def steal_share(before: CpuTicks, after: CpuTicks) -> float:
    passed = after.total - before.total
    return (after.steal - before.steal) / passed if passed > 0 else 0.0


def load_text(load: MachineLoad) -> str:
    steal = f", {percent(load.steal_share)} of the CPU time is stolen" if load.steal_share >= 0.005 else ""
    return f"{load.runnable:.1f} other {'sessions' if load.is_per_session else 'threads'} run{steal}"


def usable_cores() -> int:
    """Return the number of cores this process may use; in a container often not all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
