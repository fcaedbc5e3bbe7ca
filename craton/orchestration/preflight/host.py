"""Checks of the host: storage, shared memory, limits, clocks, CPUs."""

from __future__ import annotations

from collections.abc import Mapping

from craton.formatting import counted, memory, stored
from craton.infrastructure.probes import UNLIMITED, NodeReport, lustre_interfaces
from craton.orchestration.preflight.finding import Expected, PreflightFinding, Severity, lowered

GIBIBYTE = 2**30
SAME_CAPACITY = 0.95  # minimum share of the catalog's total capacity, which is rounded
MIN_SHARED_BYTES = 1 * GIBIBYTE  # a container without --shm-size has 64 MiB, too little for data loaders
GOOD_SHARED_BYTES = 2 * GIBIBYTE  # per GPU: data loader workers, NCCL, and checkpoint snapshots
MIN_OPEN_FILES = 8192
GOOD_HUGEPAGE_BYTES = 1 * GIBIBYTE
MIN_PROCESSES = 4096
GOOD_CLOCK_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "rootfs", "squashfs", "vfat")
SHARED_KINDS = ("lustre", "nfs", "nfs4", "efs", "beegfs", "gpfs", "ceph", "wekafs")
KIND_NAMES = {"nfs": ("nfs", "nfs4", "efs")}  # types in the mount table
SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp")  # with these, `powersave` still runs at full speed under load


def check_host(report: NodeReport, expected: Expected, environment: Mapping[str, str]) -> list[PreflightFinding]:
    return [
        *check_drives(report, expected),
        *check_shared_memory(report),
        *check_lustre(report, expected),
        *check_storage(report, expected),
        *check_limits(report),
        *check_hugepages(report, environment),
        *check_clock(report),
        *check_processors(report, expected),
        *check_group(report),
    ]


def check_drives(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Check local NVMe, a checkpoint tier and cache: if missing, data silently goes to the root disk."""
    drives, instance = report.disks.drives, expected.instance
    wanted_bytes = instance.nvme_bytes if instance and instance.name != "local" else 0.0
    total_bytes = sum(drive.size_bytes for drive in drives)
    if wanted_bytes and total_bytes < SAME_CAPACITY * wanted_bytes:
        there = f"{len(drives)} NVMe drives with {stored(total_bytes)}"
        message = f"{there}, {expected.name} has {stored(wanted_bytes)}"
        if report.host.is_container:
            return [
                _finding("nvme", "note", f"{message}; a container may not see them", "mount the node's NVMe into it")
            ]
        return [_finding("nvme", "fail", message, "replace the node: a drive is missing")]
    if not drives:
        return []
    loose = [drive.name for drive in drives if not drive.mounted_at]
    if loose:
        count = f"all {len(loose)}" if len(loose) == len(drives) else f"{len(loose)} of {len(drives)}"
        message = f"{count} NVMe drives are not mounted ({', '.join(loose)})"
        remedy = "create a RAID 0 (mdadm --level=0) and mount it; otherwise its data goes to the root disk"
        return [_finding("nvme", "warn", message, remedy)]
    places = sorted({place for drive in drives for place in drive.mounted_at})
    message = f"{len(drives)} NVMe drives, {stored(total_bytes)}, at {', '.join(places)}"
    return [_finding("nvme", "ok", message)]


def check_shared_memory(report: NodeReport) -> list[PreflightFinding]:
    size, has_gpus = report.disks.shared_memory_bytes, bool(report.gpus.cards)
    if size is None:
        return [_finding("shared_memory", "warn", "/dev/shm is not mounted", "mount -t tmpfs tmpfs /dev/shm")]
    message = f"/dev/shm has {memory(size)}"
    remedy = "--shm-size=64g for a container, an emptyDir with medium: Memory for a pod"
    if size < MIN_SHARED_BYTES:
        severity: Severity = "fail" if has_gpus else "warn"
        return [_finding("shared_memory", severity, f"{message}: data loaders and snapshots need more", remedy)]
    if size < GOOD_SHARED_BYTES * len(report.gpus.cards):
        return [
            _finding(
                "shared_memory", "warn", f"{message}, too little for {counted(len(report.gpus.cards), 'rank')}", remedy
            )
        ]
    return [_finding("shared_memory", "ok", message)]


def check_lustre(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Check Lustre: a mount over TCP works too, at a tenth of the throughput."""
    lustre = report.disks.lustre
    if not lustre.mounts:
        return []
    places = ", ".join(mount.path for mount in lustre.mounts)
    findings = [_finding("lustre_client", "ok", f"Lustre {lustre.version or 'of unknown version'} at {places}")]
    if not lustre.version:
        message = f"Lustre is mounted at {places}, but its client version is unknown"
        findings = [_finding("lustre_client", "note", message, "install lustre-client-utils for lnetctl and lctl")]
    if not lustre.interfaces_told:
        message = "the network of Lustre is unknown: lnetctl gives no output"
        return [*findings, _finding("lustre_network", "note", message, "run as root, with lnetctl installed")]
    efa = [link for link in lustre.interfaces if link.network == "efa"]
    down = [element for element in lustre.interfaces if not element.is_up]
    wanted = min(lustre_interfaces(expected.instance.name) if expected.instance else 0, len(report.fabric.efa))
    again = "run FSx's configure-efa-fsx-lustre-client/setup.sh again (journalctl -u configure-efa-fsx-lustre-client)"
    if down:
        message = f"LNet interfaces down: {', '.join(entry.nid for entry in down)}"
        return [*findings, _finding("lustre_network", "fail", message, again)]
    if efa and wanted and len(efa) < wanted:
        message = f"{len(efa)} of {wanted} EFA interfaces bound to Lustre ({', '.join(item.device for item in efa)})"
        return [*findings, _finding("lustre_network", "warn", message, again)]
    networks = sorted({interface.network for interface in lustre.interfaces})
    if report.fabric.efa and not efa:
        message = f"Lustre runs over {', '.join(networks) or 'no network'}, not EFA"
        if lustre.wants_efa:
            message += ", though this node is configured for EFA"
            return [*findings, _finding("lustre_network", "warn", message, again)]
        remedy = "with EFA enabled on the file system, one node reads up to seven times as fast"
        return [*findings, _finding("lustre_network", "note", message, remedy)]
    message = f"Lustre over {', '.join(networks)}" + (f", {len(efa)} EFA interfaces" if efa else "")
    return [*findings, _finding("lustre_network", "ok", message)]


def check_storage(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Check the storage paths of the cluster file: a path without a mount is silently the root disk."""
    findings = [*_shared_storage(report, expected), *_local_storage(report, expected)]
    return lowered(findings, "a container may not see the mounts of its node") if report.host.is_container else findings


def _shared_storage(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    path, wanted = expected.shared_path, expected.shared_kind
    mount = report.disks.mount_of(path) if path else None
    if mount is None or mount.kind == "autofs":  # mounted on first access
        return []
    if mount.kind in LOCAL_KINDS:
        there = ", ".join(entry.path for entry in report.disks.mounts if entry.kind in SHARED_KINDS)
        message = f"{path}, storage.shared of the cluster file, is on {mount.source} ({mount.kind}), a local disk"
        remedy = f"mount the shared file system at {path}, or correct the path; shared mounts: {there or 'none'}"
        findings = [PreflightFinding("orchestration", "storage_shared", "fail", message, remedy)]
        if any(item.kind == "nfsd" for item in report.disks.mounts):
            return lowered(findings, "this node is an NFS server itself")
        return findings if expected.needs_network else lowered(findings, "this run stays on one node")
    if wanted and mount.kind not in KIND_NAMES.get(wanted, (wanted,)):
        message = f"{path} is {mount.kind}, but the cluster file has {wanted}"
        return [_finding("storage_shared", "warn", message, "correct storage.shared.kind, or the mount")]
    return [_finding("storage_shared", "ok", f"{path} is {mount.kind}")]


def _local_storage(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    path, drives = expected.nvme_path, report.disks.drives
    mount = report.disks.mount_of(path) if path else None
    if mount is None:
        return []
    if mount.path != "/":
        return [_finding("storage_nvme", "ok", f"{path} is on {mount.source}")]
    message = f"{path}, storage.nvme of the cluster file, is on the root disk"
    if not drives:
        return [_finding("storage_nvme", "note", f"{message}, and the node has no other NVMe drive")]
    there = ", ".join(sorted({place for drive in drives for place in drive.mounted_at})) or "not mounted"
    remedy = f"mount the NVMe drives at {path}, or correct the path; they are at: {there}"
    return [PreflightFinding("orchestration", "storage_nvme", "fail", message, remedy)]


def check_limits(report: NodeReport) -> list[PreflightFinding]:
    files = report.host.limits.open_files
    if files is None or files == UNLIMITED or files >= MIN_OPEN_FILES:
        return [_finding("open_files", "ok", f"{'unlimited' if files in (None, UNLIMITED) else files} open files")]
    message = f"the limit is {files:,} open files; ranks with many shards and sockets need more"
    remedy = "`* - nofile 65536` in /etc/security/limits.conf; LimitNOFILE=65536 for slurmd or containerd"
    return [_finding("open_files", "warn", message, remedy)]


def check_hugepages(report: NodeReport, environment: Mapping[str, str]) -> list[PreflightFinding]:
    """Check huge pages, from which EFA takes its buffers unless configured otherwise."""
    if not report.fabric.efa:
        return []
    if environment.get("FI_EFA_USE_HUGE_PAGE") == "0":
        return [_finding("hugepages", "ok", "not used: FI_EFA_USE_HUGE_PAGE=0")]
    size = report.host.hugepages * report.host.hugepage_bytes
    message = f"{report.host.hugepages:,} huge pages, {memory(size)}"
    if size < GOOD_HUGEPAGE_BYTES:
        remedy = "sysctl vm.nr_hugepages=5128 (hugepages-2Mi in a pod), or FI_EFA_USE_HUGE_PAGE=0"
        return [_finding("hugepages", "warn", f"{message}: EFA needs more", remedy)]
    return [_finding("hugepages", "ok", message)]


def check_clock(report: NodeReport) -> list[PreflightFinding]:
    clock, findings = report.host.clock, []
    if clock.source and clock.source not in GOOD_CLOCK_SOURCES:
        message = f"the clock source is {clock.source}: reading the time is a slow system call"
        remedy = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource; `dmesg | grep -i tsc`"
        findings.append(_finding("clock_source", "warn", message, remedy))
    if clock.is_synchronised is False:
        message = f"{clock.told_by} reports that the clock is not synchronised: times of nodes cannot be compared"
        findings.append(
            _finding("clock_sync", "warn", message, "systemctl enable --now chronyd (169.254.169.123 on EC2)")
        )
    elif clock.is_synchronised is None:
        message = "it is unknown whether the clock is synchronised"
        findings.append(_finding("clock_sync", "note", message, "install chrony, unless this is a container"))
    return findings or [_finding("clock_sync", "ok", f"clock {clock.source}, synchronised ({clock.told_by})")]


def check_processors(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    host, findings = report.host, []
    if host.governor == "powersave" and host.governor_driver not in SCALING_DRIVERS:
        message = f"the CPU governor is powersave ({host.governor_driver or 'unknown driver'})"
        findings.append(_finding("governor", "warn", message, "cpupower frequency-set -g performance"))
    wanted = expected.instance.vcpus if expected.instance and expected.instance.name != "local" else 0
    if wanted and host.processors and host.processors < 0.9 * wanted:
        message = f"{host.processors} CPUs are online, {expected.name} has {wanted}"
        remedy = "set the right instance, or check for disabled hyper-threads or sockets"
        findings.append(_finding("processors", "warn", message, remedy))
    if host.numa_balancing and host.numa_nodes > 1:
        message = "automatic NUMA balancing moves memory between NUMA nodes"
        findings.append(_finding("numa", "note", message, "sysctl kernel.numa_balancing=0"))
    nodes = f"{host.numa_nodes} NUMA node{'s' if host.numa_nodes != 1 else ''}"
    return findings or [_finding("processors", "ok", f"{host.processors} CPUs, {nodes}")]


def check_group(report: NodeReport) -> list[PreflightFinding]:
    """Check the cgroup limits that the scheduler or container sets."""
    group, host = report.host.group, report.host
    messages = []
    if group.memory_bytes is not None and group.memory_bytes < 0.95 * host.memory_bytes:
        messages.append(f"{memory(group.memory_bytes)} of {memory(host.memory_bytes)} of memory")
    if group.cpus is not None and group.cpus < host.processors:
        messages.append(f"{group.cpus:g} of {host.processors} CPUs")
    findings = []
    if messages:
        message = f"the cgroup limit is {' and '.join(messages)}"
        findings.append(
            _finding("control_group", "note", message, "if unintended, request whole nodes (--exclusive --mem=0)")
        )
    short = group.cpus is not None and len(report.gpus.cards) > group.cpus
    if short:
        message = f"{group.cpus:g} CPUs for {counted(len(report.gpus.cards), 'GPU')}"
        findings.append(_finding("control_group", "warn", message, "request more: --cpus-per-task, or cpu in the pod"))
    if group.processes is not None and group.processes < MIN_PROCESSES:
        message = f"the cgroup limit is {group.processes:,} processes; data loaders and threads need more"
        findings.append(_finding("control_group", "warn", message, "TasksMax=infinity, or a higher pod pid limit"))
    return findings


def _finding(check: str, severity: Severity, evidence: str, remedy: str = "") -> PreflightFinding:
    return PreflightFinding(
        "orchestration" if check == "control_group" else "infrastructure", check, severity, evidence, remedy
    )
