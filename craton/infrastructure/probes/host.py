"""The machine around the GPUs: product name, processors, memory, limits of a process and of its cgroup, clocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from craton.infrastructure.probes.root import NodeRoot

UNLIMITED = -1
CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True)
class ProcessLimits:
    """Soft limits of one process: -1 for no limit, None if unknown."""

    locked_memory_bytes: int | None
    open_files: int | None
    processes: int | None


@dataclass(frozen=True)
class ControlGroup:
    """Limits of this process's cgroup; None: no limit."""

    memory_bytes: int | None
    cpus: float | None
    processes: int | None


@dataclass(frozen=True)
class Clock:
    source: str  # tsc, kvm-clock, ...
    is_synchronised: bool | None  # None: no time service to query
    told_by: str  # chronyc or timedatectl


@dataclass(frozen=True)
class Host:
    name: str
    vendor: str
    product: str  # on EC2 the instance type
    kernel: str  # 6.8.0-1021-aws
    system: str  # Ubuntu 22.04.5 LTS
    processors: int
    memory_bytes: int
    numa_nodes: int
    numa_balancing: bool
    governor: str
    governor_driver: str
    hugepages: int
    hugepage_bytes: int
    limits: ProcessLimits
    group: ControlGroup
    clock: Clock
    is_container: bool


def probe_host(root: NodeRoot) -> Host:
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", root.read("proc/meminfo"), re.MULTILINE))
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', root.read("etc/os-release"), re.MULTILINE)
    return Host(
        name=root.read("proc/sys/kernel/hostname"),
        vendor=root.read("sys/class/dmi/id/sys_vendor"),
        product=root.read("sys/class/dmi/id/product_name"),
        kernel=root.read("proc/sys/kernel/osrelease"),
        system=system[1] if system else "",
        processors=_count(root.read(f"{CPUS}/online")),
        memory_bytes=int(meminfo.get("MemTotal", 0)) * 1024,
        numa_nodes=sum(name.removeprefix("node").isdecimal() for name in root.names("sys/devices/system/node")),
        numa_balancing=root.read("proc/sys/kernel/numa_balancing") not in ("", "0"),
        governor=root.read(f"{CPUS}/cpu0/cpufreq/scaling_governor"),
        governor_driver=root.read(f"{CPUS}/cpu0/cpufreq/scaling_driver"),
        hugepages=int(meminfo.get("HugePages_Total", 0)),
        hugepage_bytes=int(meminfo.get("Hugepagesize", 0)) * 1024,
        limits=_limits(root.read("proc/self/limits")),
        group=_group(root),
        clock=_clock(root),
        is_container=_is_container(root),
    )


def _count(ranges: str) -> int:
    """`0-95,97` → 97."""
    total = 0
    for part in ranges.split(",") if ranges else []:
        low, _, high = part.partition("-")
        if low.isdecimal():
            total += int(high or low) - int(low) + 1
    return total


def _limits(text: str) -> ProcessLimits:
    def soft(name: str) -> int | None:
        match = re.search(rf"^{name}\s+(unlimited|\d+)\s", text, re.MULTILINE)
        return None if match is None else UNLIMITED if match[1] == "unlimited" else int(match[1])

    return ProcessLimits(soft("Max locked memory"), soft("Max open files"), soft("Max processes"))


def _group(root: NodeRoot) -> ControlGroup:
    """Return the tightest limit of this process's cgroup and its parents, of either version (cgroups(7))."""
    memory, processes, cpus = [], [], []
    for line in root.read("proc/self/cgroup").splitlines() or ["0::/"]:
        controllers, _, place = line.partition(":")[2].partition(":")
        group = PurePosixPath(place or "/")
        for item in (group, *group.parents):
            folder = (
                f"sys/fs/cgroup/{controllers}/{item}".replace("//", "/") if controllers else f"sys/fs/cgroup/{item}"
            )
            names = ("memory.max", "memory.limit_in_bytes")
            memory += [size for name in names if (size := root.number(f"{folder}/{name}")) is not None]
            if (count := root.number(f"{folder}/pids.max")) is not None:
                processes.append(count)
            quota, _, period = root.read(f"{folder}/cpu.max").partition(" ")
            if not quota:
                quota, period = root.read(f"{folder}/cpu.cfs_quota_us"), root.read(f"{folder}/cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period):
                cpus.append(int(quota) / int(period))
    bounded = [size for size in memory if size < 2**60]  # version 1 writes nearly 2**63 for no limit
    return ControlGroup(min(bounded, default=None), min(cpus, default=None), min(processes, default=None))


def _clock(root: NodeRoot) -> Clock:
    source = root.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    tracking = root.ask("chronyc")
    if tracking.worked:
        leap = re.search(r"^Leap status\s*:\s*(.*)$", tracking.text, re.MULTILINE)
        return Clock(source, bool(leap and leap[1].strip() == "Normal"), "chronyc")
    systemd = root.ask("timedatectl")
    if systemd.worked and "NTPSynchronized=" in systemd.text:
        return Clock(source, "NTPSynchronized=yes" in systemd.text, "timedatectl")
    return Clock(source, None, "")


def _is_container(root: NodeRoot) -> bool:
    if root.exists(".dockerenv") or root.exists("run/.containerenv"):
        return True
    inside = root.read("proc/self/cgroup")
    return "KUBERNETES_SERVICE_HOST" in root.environment or "kubepods" in inside or "docker" in inside
