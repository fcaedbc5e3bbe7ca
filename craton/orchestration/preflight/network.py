"""Checks of the network between nodes: EFA or InfiniBand devices, libfabric, the NCCL plugin, GPUDirect RDMA, and
environment variables that break them.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from craton.formatting import memory, percent
from craton.infrastructure.probes import UNLIMITED, NodeReport, counter_facts, is_in, traps
from craton.orchestration.preflight.finding import Expected, Layer, PreflightFinding, Severity, lowered

BUSY_BYTES = 1e12  # minimum traffic for a device's share to be meaningful
FAIR_SHARE = 0.5  # minimum traffic of a device, relative to the median of all
SLOW_RATE = 0.9  # minimum link rate, relative to the expected one
ENOUGH_LOCKED_BYTES = 2**34
GIVE_VERBS = "request the nodes' RDMA resource (rdma/…) in the pod, or give the container /dev/infiniband"


def check_network(report: NodeReport, expected: Expected, environment: Mapping[str, str]) -> list[PreflightFinding]:
    """Check the network; no finding for a node that has no fast network and should have none."""
    instance = expected.instance
    has_gpus = bool(report.gpus.cards or report.gpus.on_bus)
    wants_efa = instance is not None and instance.efa_version > 0
    findings: list[PreflightFinding] = []
    if wants_efa or report.fabric.efa:
        findings += [*check_efa_count(report, expected), *check_foreign_devices(report), *check_libfabric(report)]
        findings += [*check_plugin(report), *check_efa_counters(report)] if has_gpus else check_efa_counters(report)
    elif report.fabric.infiniband or (instance is not None and instance.gpu.generation != "cpu"):
        findings += check_infiniband(report, expected)
    if has_gpus and report.fabric.devices:
        findings += [*check_gpudirect(report), *check_gdrcopy(report), *check_gpudirect_storage(report)]
    if report.fabric.devices:
        findings += check_locked_memory(report)
    findings += check_environment(report, environment)
    # A single-node pod gets no EFA and needs none: its ranks communicate over NVLink. Environment variables that fail a
    # node only concern the network.
    return findings if expected.needs_network else lowered(findings, "this run stays on one node")


def check_efa_count(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    efa, others = report.fabric.efa, report.fabric.infiniband
    wanted = expected.instance.network_interfaces if expected.instance else 0
    beside = f", and {len(others)} that are not EFA ({', '.join(device.name for device in others)})" if others else ""
    if wanted and len(efa) < wanted:
        return [
            _finding(
                "efa_count",
                "fail",
                f"{len(efa)} of {wanted} EFA devices{beside}",
                "attach all EFA interfaces in the launch template, request all of vpc.amazonaws.com/efa in the pod, or "
                "replace the node: each missing one costs bandwidth, and without any NCCL uses TCP",
            )
        ]
    hidden = [device.name for device in efa if device.uverbs and device.uverbs not in report.fabric.visible_uverbs]
    if hidden:
        message = f"{len(efa) - len(hidden)} of {len(efa)} EFA devices are in /dev/infiniband"
        remedy = "request vpc.amazonaws.com/efa in the pod, or give the container its /dev/infiniband/uverbs devices"
        return [_finding("efa_count", "fail", message, remedy, layer="orchestration")]
    if wanted and len(efa) > wanted:
        message = f"{len(efa)} EFA devices, {expected.name} has {wanted}"
        return [_finding("efa_count", "warn", message, "set the right instance in the cluster file")]
    down = [device.name for device in efa if not device.is_active]
    if down:
        return [_finding("efa_count", "fail", f"not active: {', '.join(down)}", "reboot the node, or replace it")]
    of = f" of {wanted}" if wanted else ""
    return [_finding("efa_count", "ok", f"{len(efa)}{of} EFA devices active{beside}")]


def check_foreign_devices(report: NodeReport) -> list[PreflightFinding]:
    """Check for devices that are not EFA: P6-B200 has two `ibp*`, and libfabric fails if it cannot open them."""
    others = [device for device in report.fabric.infiniband if device.uverbs in report.fabric.visible_uverbs]
    if not others:
        return []
    names = ", ".join(device.name for device in others)
    total = len(report.fabric.efa) + len(others)
    if not report.host.is_container:
        message = f"{total} devices in /sys/class/infiniband, {len(report.fabric.efa)} of them EFA; {names} are not"
        remedy = "count EFA by its driver; on Kubernetes use the EFA device plugin 0.5.10 or later"
        return [_finding("efa_foreign_devices", "note", message, remedy)]
    return [
        _finding(
            "efa_foreign_devices",
            "fail",
            f"this container has {total} devices, of which {len(report.fabric.efa)} are EFA: {names} belong to the "
            "NVLink switches, and NCCL or libfabric fails on them",
            "use the EFA device plugin 0.5.10 or later, and do not mount /dev/infiniband from the host",
            layer="orchestration",
        )
    ]


def check_libfabric(report: NodeReport) -> list[PreflightFinding]:
    libfabric, efa = report.fabric.libfabric, report.fabric.efa
    if not libfabric.is_there:
        remedy = "run the EFA installer (--skip-kmod in a container)"
        return [
            _finding("libfabric", "warn", "fi_info is not installed: it is unknown whether libfabric sees EFA", remedy)
        ]
    if not libfabric.domains:
        return [
            _finding(
                "libfabric",
                "fail",
                f"libfabric finds no EFA ({libfabric.error}): NCCL would use TCP sockets",
                "give the container its /dev/infiniband/uverbs devices with the device plugin, load the module efa, or "
                "run the EFA installer",
            )
        ]
    if efa and len(libfabric.domains) < len(efa):
        message = f"libfabric sees {len(libfabric.domains)} of {len(efa)} EFA devices"
        return [_finding("libfabric", "fail", message, "give the container all of its EFA devices")]
    return [_finding("libfabric", "ok", f"libfabric has the provider efa on {len(libfabric.domains)} devices")]


def check_plugin(report: NodeReport) -> list[PreflightFinding]:
    """Check for aws-ofi-nccl: without it NCCL silently does not use EFA."""
    fabric = report.fabric
    if fabric.plugin_is_found:
        version = fabric.versions.get("aws_ofi_nccl", "of unknown version")
        return [_finding("nccl_plugin", "ok", f"aws-ofi-nccl {version} is found by the loader")]
    remedy = "run the EFA installer 1.34 or later, which includes aws-ofi-nccl, and put it on LD_LIBRARY_PATH"
    if fabric.plugins:
        remedy = f"export LD_LIBRARY_PATH={fabric.plugins[0].rpartition('/')[0]}:$LD_LIBRARY_PATH"
    if fabric.loaded_plugin:
        beside = f"{fabric.plugins[0]} comes after it" if fabric.plugins else "aws-ofi-nccl is missing"
        message = f"NCCL loads {fabric.loaded_plugin}, which lacks EFA, and {beside}: it would use TCP sockets"
    elif fabric.plugins:
        message = f"{fabric.plugins[0]} exists, but neither ldconfig nor LD_LIBRARY_PATH finds it"
    else:
        message = "aws-ofi-nccl is missing: NCCL would use TCP sockets"
    return [_finding("nccl_plugin", "fail", message, remedy)]


def check_infiniband(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Check for ports at full rate; slower ports, such as for storage, do not replace a missing one."""
    devices, instance = report.fabric.infiniband, expected.instance
    active = [device for device in devices if device.state == "ACTIVE"]
    wanted = instance.network_interfaces if instance else 0
    due = max((device.gigabits_per_second for device in active), default=0.0)
    if instance is not None and wanted:
        due = max(due, instance.network_bytes_per_second * 8 / 1e9 / wanted)
    fast = [device for device in active if device.gigabits_per_second >= SLOW_RATE * due]
    visible = [device for device in fast if not device.uverbs or device.uverbs in report.fabric.visible_uverbs]
    if fast and len(visible) < min(wanted or 1, len(fast)):
        lost = "NCCL cannot use the others" if visible else "NCCL would use TCP sockets"
        text = f"{len(visible)} of {len(fast)} InfiniBand ports are in /dev/infiniband: {lost}"
        return [_finding("infiniband", "fail", text, GIVE_VERBS, layer="orchestration")]
    if not devices and wanted and report.host.is_container:
        text = f"0 of {wanted} InfiniBand ports were given to this container"
        return [_finding("infiniband", "fail", text, GIVE_VERBS, layer="orchestration")]
    if len(fast) >= wanted:
        text = f"{len(fast)} InfiniBand ports active at {due:g} Gb/s"
        return [_finding("infiniband", "ok", text)] if active else []
    down = [f"{device.name} {device.state or 'unknown'}" for device in devices if device not in active]
    if down or len(active) < wanted:
        message = f" ({', '.join(down)})" if down else ""
        remedy = "check cable and switch port (`ibstat` shows more); the node is slow or unreachable until then"
        return [_finding("infiniband", "fail", f"{len(fast)} of {wanted} InfiniBand ports active{message}", remedy)]
    slow = [f"{device.name} {device.gigabits_per_second:g}" for device in active if device not in fast]
    remedy = "reseat or replace the cable; a slow port slows down every ring through it"
    return [_finding("infiniband", "warn", f"{', '.join(slow)} Gb/s, expected {due:g}", remedy)]


def check_gpudirect(report: NodeReport) -> list[PreflightFinding]:
    """Check GPUDirect RDMA: by nvidia_peermem, or by dma-buf with open kernel modules and kernel 5.12 or later."""
    fabric = report.fabric
    kernel = report.software.versions.get("kernel", "")
    if fabric.efa_peer_to_peer.lower().startswith("nvidia"):
        return [_finding("gpudirect_rdma", "ok", "the EFA driver has peer-to-peer access to GPU memory")]
    if fabric.peer_memory:
        return [_finding("gpudirect_rdma", "ok", "nvidia_peermem is loaded")]
    if report.gpus.open_modules and is_in(kernel, ">=5.12"):
        return [_finding("gpudirect_rdma", "ok", f"dma-buf: open kernel modules on kernel {kernel}")]
    message = "neither nvidia_peermem nor dma-buf: network traffic goes through host memory"
    remedy = "modprobe nvidia_peermem, or install NVIDIA's open kernel modules"
    return [_finding("gpudirect_rdma", "fail", message, remedy)]


def check_gdrcopy(report: NodeReport) -> list[PreflightFinding]:
    version = report.fabric.versions.get("gdrcopy", "")
    if version and report.fabric.gdrcopy_device:
        return [_finding("gdrcopy", "ok", f"gdrdrv {version}")]
    if version:
        message, remedy = "gdrdrv is loaded, but /dev/gdrdrv is missing", "give the container /dev/gdrdrv"
        return [_finding("gdrcopy", "warn", message, remedy)]
    message = "GDRCopy's gdrdrv is not loaded: small messages take longer"
    severity: Severity = "warn" if report.fabric.efa else "note"
    return [_finding("gdrcopy", severity, message, "install GDRCopy 2.5 or later and modprobe gdrdrv")]


def check_gpudirect_storage(report: NodeReport) -> list[PreflightFinding]:
    version = report.fabric.versions.get("nvidia_fs", "")
    if version:
        return [_finding("gpudirect_storage", "ok", f"nvidia-fs {version}")]
    return [_finding("gpudirect_storage", "note", "nvidia-fs is not loaded: files go through host memory", "")]


def check_locked_memory(report: NodeReport) -> list[PreflightFinding]:
    limit = report.host.limits.locked_memory_bytes
    if limit is None or limit == UNLIMITED:
        return [_finding("locked_memory", "ok", "locked memory is not limited")]
    severity: Severity = "note" if limit >= ENOUGH_LOCKED_BYTES else "fail"
    message = f"the locked memory limit is {memory(limit)}, and RDMA needs its buffers locked"
    remedy = "`* - memlock unlimited` in /etc/security/limits.conf; LimitMEMLOCK=infinity for slurmd or containerd"
    return [_finding("locked_memory", severity, message, remedy)]


def check_efa_counters(report: NodeReport) -> list[PreflightFinding]:
    findings = []
    for fact in counter_facts():
        hit = {}
        for device in report.fabric.efa:
            value = float(device.counters.get(fact.name, 0))
            whole = float(device.counters.get(fact.share_of, 0)) if fact.share_of else 1.0
            if whole and value / whole > fact.above:
                hit[device.name] = value / whole
        if hit:
            name, value = max(hit.items(), key=lambda item: item[1])
            much = percent(value) if fact.share_of else f"{value:,.0f}"
            devices = name if len(hit) == 1 else f"{len(hit)} devices, highest on {name}"
            message = f"{fact.name}: {much} {fact.meaning} ({devices})"
            findings.append(_finding("efa_counters", fact.severity, message, fact.remedy))
    sent = {device.name: device.counters.get("tx_bytes", 0) for device in report.fabric.efa}
    usual = median(sent.values()) if sent else 0
    idle = [name for name, count in sent.items() if usual > BUSY_BYTES and count < FAIR_SHARE * usual]
    if idle:
        message = f"{', '.join(idle)} carried less than half of the median traffic"
        remedy = "compare with another node; a device with less traffic has a bad path, or NCCL does not use it"
        findings.append(_finding("efa_counters", "warn", message, remedy))
    if not findings and report.fabric.efa:
        return [_finding("efa_counters", "ok", "no significant retransmissions, drops or errors")]
    return findings


def check_environment(report: NodeReport, environment: Mapping[str, str]) -> list[PreflightFinding]:
    here = {"any"}
    has_gpus = bool(report.gpus.cards or report.gpus.on_bus)
    if report.fabric.efa:
        here |= {"efa", "rdma"}
    elif report.fabric.infiniband:
        here |= {"infiniband", "rdma"}
    findings = []
    for trap in traps() if has_gpus or report.fabric.devices else ():
        if trap.fabric not in here:
            continue
        for name in trap.hits(environment):
            value = f"={environment[name]}" if name in environment and not trap.unset else ""
            findings.append(_finding("environment", trap.severity, f"{name}{value}: {trap.problem}", trap.remedy))
    if not findings and has_gpus:
        return [_finding("environment", "ok", "no harmful variable of NCCL, libfabric or CUDA")]
    return findings


def _finding(
    check: str, severity: Severity, evidence: str, remedy: str = "", layer: Layer | None = None
) -> PreflightFinding:
    of_software = check in ("environment", "nccl_plugin", "libfabric")
    return PreflightFinding(
        layer or ("ML software" if of_software else "infrastructure"), check, severity, evidence, remedy
    )
