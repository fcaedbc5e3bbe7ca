"""Observe this machine: load and pressure, file systems, and with GPUs also GPUs and network.

Rates come from two readings half a second apart. Everything is read from /proc and /sys; only GPUs need a tool.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from craton.infrastructure.probes import NodeReport, NodeRoot, probe_node
from craton.observability.diagnosis.snapshot import (
    SnapshotFabricDevice,
    SnapshotGpu,
    SnapshotHost,
    SnapshotMount,
    SnapshotNode,
    SnapshotXid,
)
from craton.observability.diagnosis.used_mounts import is_under
from craton.telemetry import RunDirectory

BETWEEN_SECONDS = 0.5
PAGE_BYTES = 4096
ERROR_COUNTERS = (
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
)
PEER_COUNTERS = ("unresponsive_remote_events", "impaired_remote_conn_events")
NETWORK_FILE_SYSTEMS = ("lustre", "nfs", "nfs4", "ceph", "fuse", "cifs", "beegfs", "gpfs")


@dataclass(frozen=True)
class ObservedMachine:
    """Observations of this machine."""

    host: SnapshotHost
    mounts: tuple[SnapshotMount, ...]
    gpus: tuple[SnapshotGpu, ...] = ()
    gpus_known: bool = False
    fabric: tuple[SnapshotFabricDevice, ...] = ()

    def onto(self, node: SnapshotNode) -> SnapshotNode:
        """Return a node of the run on this machine with these observations, including all GPUs."""
        return replace(
            node, host=self.host, mounts=self.mounts, gpus=self.gpus, gpus_known=self.gpus_known, fabric=self.fabric
        )


@dataclass(frozen=True)
class _Reading:
    moment: float
    processor: Mapping[str, float]  # jiffies by mode
    own: float  # jiffies of this run's processes
    counters: Mapping[str, int]  # /proc/vmstat
    disks: Mapping[str, tuple[float, ...]]  # device → its line of /proc/diskstats
    blocked: Mapping[int, str]
    fabric: Mapping[str, Mapping[str, int]]


def look_at_machine(run: RunDirectory, with_gpus: bool, ranks_per_node: int, root: str = "/") -> ObservedMachine:
    """Observe this machine."""
    first = _read(root, run, with_gpus)
    report = probe_node(NodeRoot(root)) if with_gpus else None
    time.sleep(max(0.0, BETWEEN_SECONDS - (time.monotonic() - first.moment)))
    second = _read(root, run, with_gpus)
    return ObservedMachine(
        host=_host(root, first, second),
        mounts=_mounts(run, root, first, second),
        gpus=_gpus(report) if report else (),
        gpus_known=bool(report and (report.gpus.cards or report.gpus.on_bus)),
        fabric=_fabric(report, first, second) if report else (),
    )


def _read(root: str, run: RunDirectory, with_gpus: bool) -> _Reading:
    node = NodeRoot(root, files_only=True)
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = node.read("proc/stat").partition("\n")[0].split()[1:]
    own, blocked = _processes(root, str(run.path))
    return _Reading(
        moment=time.monotonic(),
        processor={name: float(value) for name, value in zip(names, line, strict=False)},
        own=own,
        counters={
            key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", node.read("proc/vmstat"), re.MULTILINE)
        },
        disks={
            row[2]: tuple(float(value) for value in row[3:])
            for item in node.read("proc/diskstats").splitlines()
            if len(row := item.split()) >= 14
        },
        blocked=blocked,
        fabric=_fabric_counters(node) if with_gpus else {},
    )


def _processes(root: str, run: str) -> tuple[float, dict[int, str]]:
    """Return the jiffies used by the run's processes, and the processes in uninterruptible sleep."""
    own, blocked = 0.0, {}
    for folder in Path(root, "proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            if fields[0] == "D":
                blocked[int(folder.name)] = name.partition("(")[2]
            if run in (folder / "cmdline").read_bytes().decode(errors="replace") or run in _environment_run(folder):
                own += float(fields[11]) + float(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return own, blocked


def _environment_run(folder: Path) -> str:
    """Return the run in the environment of a process: ranks of a command do not have it in their arguments."""
    match = re.search(rb"(?:^|\0)CRATON_RUN=([^\0]*)", (folder / "environ").read_bytes())
    return match[1].decode(errors="replace") if match else ""


def _host(root: str, first: _Reading, second: _Reading) -> SnapshotHost:
    node = NodeRoot(root, files_only=True)
    seconds = max(1e-3, second.moment - first.moment)
    total = sum(second.processor.values()) - sum(first.processor.values())
    gained = {name: second.processor[name] - first.processor.get(name, 0.0) for name in second.processor}
    busy = total - gained.get("idle", 0.0) - gained.get("iowait", 0.0)
    foreign = max(0.0, busy - gained.get("steal", 0.0) - max(0.0, second.own - first.own))
    meminfo = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", node.read("proc/meminfo"), re.MULTILINE)
    }
    load = node.read("proc/loadavg").split()
    swapped = sum(second.counters.get(name, 0) - first.counters.get(name, 0) for name in ("pswpin", "pswpout"))
    # A process in state D in both readings is not just doing I/O.
    blocked = [name for pid, name in second.blocked.items() if pid in first.blocked]
    return SnapshotHost(
        processors=os.cpu_count(),
        load=float(load[0]) if load else None,
        processor_pressure=_pressure(node, "cpu", "some"),
        memory_pressure=_pressure(node, "memory", "full"),
        steal_share=gained.get("steal", 0.0) / total if total > 0 else None,
        memory_available_share=meminfo["MemAvailable"] / meminfo["MemTotal"] if "MemAvailable" in meminfo else None,
        swapped_bytes_per_second=swapped * PAGE_BYTES / seconds,
        foreign_processor_share=foreign / total if total > 0 else None,
        blocked_processes=tuple(sorted(set(blocked))),
        shared_memory_full_share=_full(Path(root, "dev/shm")),
    )


def _pressure(node: NodeRoot, resource: str, kind: str) -> float | None:
    """Return the share of the last ten seconds (Linux PSI); None if the kernel does not report it."""
    match = re.search(rf"^{kind} avg10=([\d.]+)", node.read(f"proc/pressure/{resource}"), re.MULTILINE)
    return float(match[1]) / 100.0 if match else None


def _mounts(run: RunDirectory, root: str, first: _Reading, second: _Reading) -> tuple[SnapshotMount, ...]:
    """Return the file system of the run directory."""
    rows = [line.split() for line in NodeRoot(root, files_only=True).read("proc/self/mounts").splitlines()]
    points = [(row[1], row[2], row[0], row[3]) for row in rows if len(row) >= 4 and is_under(str(run.path), row[1])]
    if not points:
        return ()
    path, kind, device, options = max(points, key=lambda point: len(point[0]))
    full, inodes = _full(run.path), _inodes(run.path)
    seconds = max(1e-3, second.moment - first.moment)
    name = os.path.basename(os.path.realpath(device))
    before, after = first.disks.get(name), second.disks.get(name)
    busy = read_rate = write_rate = None
    if before and after and kind not in NETWORK_FILE_SYSTEMS:
        gained = [new - old for new, old in zip(after, before, strict=False)]
        busy = min(1.0, gained[9] / 1e3 / seconds)
        read_rate, write_rate = gained[2] * 512 / seconds, gained[6] * 512 / seconds
    return (
        SnapshotMount(
            path=path,
            kind=kind,
            holds=("run", "checkpoints"),
            read_bytes_per_second=read_rate,
            write_bytes_per_second=write_rate,
            busy_share=busy,
            full_share=full,
            inodes_full_share=inodes,
            is_read_only="ro" in options.split(","),
        ),
    )


def _full(path: Path) -> float | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    usable = stat.f_blocks - stat.f_bfree + stat.f_bavail
    return 1.0 - stat.f_bavail / usable if usable else None


def _inodes(path: Path) -> float | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return 1.0 - stat.f_favail / stat.f_files if stat.f_files else None


def _gpus(report: NodeReport) -> tuple[SnapshotGpu, ...]:
    now = time.time()
    gpus = []
    for card in report.gpus.cards:
        xids = tuple(
            SnapshotXid(
                xid.code,
                now - xid.age_seconds if xid.age_seconds is not None else None,
                xid.text,
                xid.recovery,
                xid.before_reload,
                xid.is_fatal,
            )
            for xid in report.kernel_log.xids
            if not xid.is_switch and card.bus_id.startswith(xid.bus_id)
        )
        width = (card.pcie_width or 0) / card.max_pcie_width if card.pcie_width and card.max_pcie_width else None
        gpus.append(
            SnapshotGpu(
                index=card.index,
                throttle=card.throttle,
                sm_clock_mhz=card.sm_clock_mhz,
                max_sm_clock_mhz=card.max_sm_clock_mhz,
                utilisation=0.0 if card.is_idle else None,
                temperature_celsius=card.temperature_celsius,
                power_limit_watts=card.power_limit_watts,
                default_power_limit_watts=card.default_power_limit_watts,
                uncorrectable_errors=card.volatile_uncorrectable,
                remap_pending=card.remap_pending,
                remap_failed=card.remap_failed,
                recovery_action=card.recovery_action,
                xids=xids,
                nvlinks_up=sum(link.is_up for link in card.nvlinks) if card.nvlinks else None,
                nvlinks=len(card.nvlinks) or None,
                pcie_share=width,
                uuid=card.uuid,
            )
        )
    return tuple(gpus)


def _fabric_counters(node: NodeRoot) -> dict[str, dict[str, int]]:
    folder = "sys/class/infiniband"
    return {
        name: {
            counter: value
            for kind in ("hw_counters", "counters")
            for counter in node.names(f"{folder}/{name}/ports/1/{kind}")
            if (value := node.number(f"{folder}/{name}/ports/1/{kind}/{counter}")) is not None
        }
        for name in node.names(folder)
    }


def _fabric(report: NodeReport, first: _Reading, second: _Reading) -> tuple[SnapshotFabricDevice, ...]:
    seconds = max(1e-3, second.moment - first.moment)
    devices = []
    for device in report.fabric.devices:
        before, after = first.fabric.get(device.name, {}), second.fabric.get(device.name, {})

        def gained(
            names: Sequence[str], before: Mapping[str, int] = before, after: Mapping[str, int] = after
        ) -> float | None:
            gains = [after[name] - before[name] for name in names if name in after and name in before]
            return float(sum(gains)) if gains else None

        sent, again = gained(("tx_bytes",)), gained(("retrans_bytes",))
        words = gained(("port_xmit_data",))  # InfiniBand counts words of four bytes
        total = sent if sent is not None else None if words is None else 4.0 * words
        drops, errors = gained(("rx_drops",)), gained(ERROR_COUNTERS)
        devices.append(
            SnapshotFabricDevice(
                name=device.name,
                is_active=device.is_active,
                sent_bytes_per_second=None if total is None else total / seconds,
                retransmitted_share=again / total if again is not None and total else None,
                drops_per_second=None if drops is None else drops / seconds,
                errors_per_second=None if errors is None else errors / seconds,
                peer_events=gained(PEER_COUNTERS),
                link_downs=gained(("link_downed",)),
            )
        )
    return tuple(devices)
