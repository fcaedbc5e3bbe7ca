"""Checks of a node's GPUs: pure functions of the probe report and the expected node."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from craton.formatting import counted, memory, whole_duration
from craton.infrastructure import CatalogError, Gpu
from craton.infrastructure.catalog import gpu
from craton.infrastructure.probes import (
    HEALTH_ACTIONS,
    GpuState,
    HealthAction,
    NodeReport,
    Xid,
    recovery_action,
    xid_facts,
)
from craton.orchestration.preflight.finding import Expected, PreflightFinding, Severity

SAME_MEMORY = 0.05  # tolerance against the catalog's memory: less is a MIG slice, more another GPU
OLD_XID_SECONDS = 3600.0
# A GPU off the bus does not come back without a reset or reboot, and a failed row remapping stays in the GPU's own
# records: for these two nvidia-smi always reports whether they still hold.
SHOWN_BY_NVIDIA_SMI = (64, 79)
HARDWARE_THROTTLE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
THERMAL_THROTTLE = ("sw_thermal_slowdown",)
ACTION_SEVERITY: dict[HealthAction, Severity] = {
    "observe": "note",
    "restart": "note",
    "reset": "fail",
    "reboot": "fail",
    "replace": "fail",
}
ACTION_REMEDY: dict[HealthAction, str] = {
    "observe": "nothing now",
    "restart": "restart the job",
    "reset": "drain the node and reset the GPU: nvidia-smi --gpu-reset -i INDEX, or reboot if that is not permitted",
    "reboot": "drain and reboot the node; replace it if the problem comes back",
    "replace": "drain and replace the node",
}


def check_gpus(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Check all GPUs; no finding for a node that has none and should have none."""
    gpus = report.gpus
    if not gpus.on_bus and not gpus.cards and not expected.gpus and not gpus.driver_loaded:
        return []
    findings = [*check_driver(report, expected), *check_count(report, expected)]
    if not gpus.cards:
        return [*findings, *check_xids(report)]
    return [
        *findings,
        *check_model(gpus.cards, expected),
        *check_recovery(gpus.cards),
        *check_memory(gpus.cards),
        *check_throttle(gpus.cards),
        *check_settings(gpus.cards),
        *check_pcie(gpus.cards),
        *check_nvlink(report, expected),
        *check_xids(report),
    ]


def check_driver(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    gpus = report.gpus
    if not gpus.error:
        message = f"driver {gpus.driver_version}, CUDA up to {gpus.cuda_version}"
        return [_finding("gpu_driver", "ok", message)]
    if gpus.on_bus or gpus.driver_loaded:
        remedy = "`dmesg | grep -i nvrm` shows why; reboot the node, or reinstall the driver"
        return [
            _finding(
                "gpu_driver", "fail", f"{counted(len(gpus.on_bus), 'GPU')} on the PCI bus, but {gpus.error}", remedy
            )
        ]
    remedy = "start the container with GPUs (nvidia.com/gpu, --gres=gpu:N), or exclude this node"
    return [_finding("gpu_driver", "fail", f"no GPU is visible: {gpus.error}", remedy)] if expected.gpus else []


def check_count(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    """Compare the driver's GPU count with the run's need, the catalog and the PCI bus."""
    num_gpus, on_bus, wanted = len(report.gpus.cards), len(report.gpus.on_bus), expected.gpus
    missing = sorted(set(report.gpus.on_bus) - {card.bus_id for card in report.gpus.cards})
    bus = f"; the PCI bus has {on_bus}, without a driver: {', '.join(missing)}" if missing and on_bus > num_gpus else ""
    if wanted and num_gpus < wanted:
        remedy = "reboot the node, replace it if the GPU stays missing; give a container all its GPUs"
        return [_finding("gpu_count", "fail", f"{num_gpus} of {wanted} GPUs ({expected.name}){bus}", remedy)]
    if wanted and num_gpus > wanted and expected.instance is not None and not expected.num_gpus:
        message = f"{counted(num_gpus, 'GPU')}, {expected.name} has {wanted}"
        return [_finding("gpu_count", "warn", message, "set the right instance in the cluster file")]
    if bus and not wanted and not report.host.is_container and not report.gpus.error:
        remedy = "reboot the node; replace it if the GPU stays missing"
        return [_finding("gpu_count", "fail", f"{num_gpus} of {on_bus} GPUs{bus}", remedy)]
    of = f" of {wanted}" if wanted else ""
    return [_finding("gpu_count", "ok", f"{num_gpus}{of} GPUs")]


def check_model(cards: Iterable[GpuState], expected: Expected) -> list[PreflightFinding]:
    names = Counter(card.name for card in cards)
    if len(names) > 1:
        message = ", ".join(f"{count} x {name}" for name, count in names.most_common())
        return [_finding("gpu_model", "fail", f"different GPUs in one node: {message}", "replace the node")]
    (name,) = names
    instance = expected.instance
    if instance is None or instance.gpu.generation == "cpu":
        return [_finding("gpu_model", "ok", name)]
    memory_bytes = min((card.memory_bytes for card in cards if card.memory_bytes), default=0.0)
    if not is_model(name, instance.gpu):
        message = f"{name}, but {instance.name} has {instance.gpu.name}"
        return [
            _finding("gpu_model", "fail", message, "set the right instance in the cluster file, or replace the node")
        ]
    if memory_bytes and abs(memory_bytes / instance.gpu.memory_bytes - 1.0) > SAME_MEMORY:
        message = f"{name} with {memory(memory_bytes)}, expected {memory(instance.gpu.memory_bytes)} (catalog)"
        return [_finding("gpu_model", "fail", message, "switch MIG off, or correct the catalog entry")]
    return [_finding("gpu_model", "ok", f"{name}, as expected for {instance.name}")]


def is_model(name: str, wanted: Gpu) -> bool:
    """Whether nvidia-smi's name matches a catalog GPU: `NVIDIA H100 80GB HBM3`, `NVIDIA B300 SXM6 AC`."""
    short = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    try:
        return gpu(short).name == wanted.name
    except CatalogError:
        words = re.split(r"[\s-]+", short.upper())
        return wanted.name.upper().split("-")[0] in words


def check_recovery(cards: Iterable[GpuState]) -> list[PreflightFinding]:
    asked = [card for card in cards if card.recovery_action not in ("", "None")]
    if not asked:
        return [_finding("gpu_recovery", "ok", "the driver requests no recovery action")]
    return [
        _finding(
            "gpu_recovery",
            "fail",
            f"{card.label}: the driver requests `{card.recovery_action}`",
            ACTION_REMEDY[recovery_action(card.recovery_action)].replace("INDEX", str(card.index)),
            recovery_action(card.recovery_action),
        )
        for card in asked
    ]


def check_memory(cards: Iterable[GpuState]) -> list[PreflightFinding]:
    """Check ECC errors and row remapping: data lost now, repairs pending a reset, memory beyond repair."""
    findings = [finding for card in cards for finding in _memory_faults(card)]
    return findings or [_finding("gpu_memory", "ok", "no uncorrectable ECC errors, no rows pending or failed")]


def _memory_faults(card: GpuState) -> Iterator[PreflightFinding]:
    def fault(
        check: str, severity: Severity, text: str, remedy: str, action: HealthAction = "observe"
    ) -> PreflightFinding:
        return _finding(check, severity, f"{card.label}: {text}", remedy.replace("INDEX", str(card.index)), action)

    def asks(check: str, severity: Severity, text: str, action: HealthAction) -> PreflightFinding:
        return fault(check, severity, text, ACTION_REMEDY[action], action)

    if card.remap_failed:
        yield asks("gpu_row_remap", "fail", "rows could not be remapped", "replace")
    elif card.remap_pending:
        yield asks("gpu_row_remap", "warn", "a row remapping is pending", "reset")
    if card.unrepairable:
        yield asks("gpu_memory", "fail", "its memory is beyond repair", "replace")
    elif card.repair_pending:
        yield asks("gpu_memory", "warn", "a memory repair is pending a reset", "reset")
    if card.sram_threshold_exceeded:
        yield asks("gpu_memory", "fail", "SRAM errors exceed NVIDIA's threshold", "replace")
    if card.volatile_uncorrectable:
        text = f"{card.volatile_uncorrectable} uncorrectable ECC errors since the driver was loaded"
        yield asks("gpu_memory", "fail", text, "reset")
    elif card.aggregate_uncorrectable:
        text = f"{card.aggregate_uncorrectable} uncorrectable ECC errors in its lifetime, none since the last reset"
        yield fault("gpu_memory", "note", text, "watch it")
    if card.ecc is False:
        remedy = "nvidia-smi -i INDEX -e 1 and reboot: without ECC a flipped bit is a wrong result"
        yield fault("gpu_memory", "warn", "ECC is disabled", remedy)


def check_throttle(cards: Iterable[GpuState]) -> list[PreflightFinding]:
    findings = []
    for card in cards:
        hardware = [reason for reason in card.throttle if reason in HARDWARE_THROTTLE]
        thermal = [reason for reason in card.throttle if reason in THERMAL_THROTTLE]
        if hardware or thermal:
            at = f" at {card.sm_clock_mhz:.0f} of {card.max_sm_clock_mhz:.0f} MHz" if card.max_sm_clock_mhz else ""
            warm = f", {card.temperature_celsius:.0f} °C" if card.temperature_celsius is not None else ""
            findings.append(
                _finding(
                    "gpu_throttle",
                    "fail" if hardware else "warn",
                    f"{card.label}: {', '.join([*hardware, *thermal])}{at}{warm}",
                    "check cooling and power of the node; exclude it until then, it slows down every rank",
                )
            )
        limit, default = card.power_limit_watts, card.default_power_limit_watts
        if limit and default and limit < default:
            message = f"{card.label}: power limit {limit:.0f} W, its default is {default:.0f} W"
            findings.append(_finding("gpu_throttle", "warn", message, f"nvidia-smi -i {card.index} -pl {default:.0f}"))
    return findings or [_finding("gpu_throttle", "ok", "no GPU is throttled by temperature or power")]


def check_settings(cards: Iterable[GpuState]) -> list[PreflightFinding]:
    off = [card for card in cards if card.persistence is False]
    sliced = [card for card in cards if card.mig]
    findings = []
    if off:
        message = f"persistence mode is off on {_labels(off)}"
        findings.append(_finding("gpu_persistence", "warn", message, "systemctl enable --now nvidia-persistenced"))
    if sliced:
        message = f"MIG is enabled on {_labels(sliced)}"
        findings.append(_finding("gpu_mig", "warn", message, "nvidia-smi -mig 0, for jobs that need whole GPUs"))
    return findings or [_finding("gpu_persistence", "ok", "persistence mode is on")]


def check_pcie(cards: Iterable[GpuState]) -> list[PreflightFinding]:
    """Check the PCIe link: fewer lanes are always a fault; a lower generation may be power saving of an idle GPU."""
    findings = []
    for card in cards:
        if card.pcie_width and card.max_pcie_width and card.pcie_width < card.max_pcie_width:
            message = f"{card.label}: x{card.pcie_width} of x{card.max_pcie_width} lanes"
            remedy = "reboot the node; replace it if lanes stay missing"
            findings.append(_finding("gpu_pcie", "fail", message, remedy))
        generation, newest = card.pcie_generation, card.max_pcie_generation
        if generation and newest and generation < newest:
            message = f"{card.label}: PCIe {generation} of {newest}{' while idle' if card.is_idle else ' under load'}"
            remedy = "" if card.is_idle else "reboot the node; replace it if the link stays slow"
            findings.append(_finding("gpu_pcie", "note" if card.is_idle else "warn", message, remedy))
    return findings or [_finding("gpu_pcie", "ok", "every GPU has all its PCIe lanes")]


def check_nvlink(report: NodeReport, expected: Expected) -> list[PreflightFinding]:
    cards = report.gpus.cards
    findings = []
    for card in cards:
        if card.fabric_state and (card.fabric_state != "Completed" or card.fabric_status not in ("", "Success")):
            message = f"{card.label}: NVSwitch fabric `{card.fabric_state}` {card.fabric_status}".rstrip()
            remedy = (
                "systemctl restart nvidia-fabricmanager with no process on the GPUs; its version must match the driver"
            )
            findings.append(_finding("nvlink_fabric", "fail", message, remedy))
    most = max((len(card.nvlinks) for card in cards), default=0)
    instance = expected.instance
    if most == 0:
        wanted = instance is not None and instance.nvlink_domain_gpus > 1 and len(cards) > 1
        if wanted and report.gpus.nvlink_told:
            message = "no NVLink is up on any GPU"
            findings.append(
                _finding("nvlink", "fail", message, "systemctl status nvidia-fabricmanager; reboot the node")
            )
        return findings
    fastest = max(link.gigabytes_per_second for card in cards for link in card.nvlinks)
    for card in cards:
        down = [str(link.number) for link in card.nvlinks if not link.is_up]
        slow = [str(link.number) for link in card.nvlinks if 0 < link.gigabytes_per_second < 0.9 * fastest]
        remedy = "reboot the node; replace it if the link stays down"
        if down or len(card.nvlinks) < most:
            up = sum(link.is_up for link in card.nvlinks)
            which = f": link {', '.join(down)} inactive" if down else ""
            findings.append(_finding("nvlink", "fail", f"{card.label}: {up} of {most} NVLinks up{which}", remedy))
        elif slow:
            message = f"{card.label}: link {', '.join(slow)} below {fastest:g} GB/s"
            findings.append(_finding("nvlink", "warn", message, remedy))
    return findings or [_finding("nvlink", "ok", f"{most} NVLinks up on each of {len(cards)} GPUs")]


def check_xids(report: NodeReport) -> list[PreflightFinding]:
    """Report the most severe current XID of every GPU; the last XID 154 takes precedence over the table."""
    log = report.kernel_log
    if not log.is_readable:
        message = f"the kernel log cannot be read: {log.error}"
        return [_finding("xid", "note", message, "run as root to read XIDs, or set kernel.dmesg_restrict=0")]
    if not log.xids:
        return [_finding("xid", "ok", "no XID in the kernel log")]
    return [_of_card(report, bus, [xid for xid in log.xids if xid.bus_id == bus]) for bus in _buses(log.xids)]


def _of_card(report: NodeReport, bus: str, every: list[Xid]) -> PreflightFinding:
    card = next((card for card in report.gpus.cards if card.bus_id.startswith(bus)), None)
    # nvidia-smi shows an NVSwitch only through its GPUs.
    beside = (card,) if card is not None else report.gpus.cards if every[0].is_switch else ()
    is_clean = bool(beside) and all(item.is_clean for item in beside)
    xids = [xid for xid in every if not (is_clean and is_over(xid))]
    place = card.label if card else f"{'NVSwitch' if every[0].is_switch else 'GPU'} {bus}"
    if not xids:
        gravest = max(every, key=lambda xid: HEALTH_ACTIONS.index(xid.action))
        past = f"{place}: {xid_text(gravest)}{_and_more(every)}, {_when(gravest)}; nvidia-smi reports no fault"
        return _finding("xid", "note", past, "nothing now; open a support case if the same GPU fails again")
    reset_xid = next((xid for xid in reversed(xids) if xid.recovery), None)
    causes = [xid for xid in xids if not xid.recovery] or xids
    gravest = max(causes, key=lambda xid: HEALTH_ACTIONS.index(xid.action))
    action, reason = gravest.action, xid_text(gravest)
    if reset_xid is not None:
        action = recovery_action(reset_xid.recovery)
        reason = f"{'' if gravest.recovery else f'{reason}; '}XID 154 requests `{reset_xid.recovery}`"
    remedy = ACTION_REMEDY[action].replace("INDEX", str(card.index) if card else "INDEX")
    fact = xid_facts().get(gravest.code)
    if action in ("observe", "restart") and fact is not None and reset_xid is None:
        remedy = fact.advice
    return _finding("xid", ACTION_SEVERITY[action], f"{place}: {reason}{_and_more(xids)}", remedy, action)


def is_over(xid: Xid) -> bool:
    """Whether an XID is in the past, for a GPU that nvidia-smi now reports without faults: its remedy may have been
    applied, and the kernel log keeps the XID until the next boot."""
    is_old = xid.age_seconds is not None and xid.age_seconds > OLD_XID_SECONDS
    return xid.code in SHOWN_BY_NVIDIA_SMI or is_old or xid.before_reload


def _when(xid: Xid) -> str:
    if xid.before_reload:
        return "before the driver was reloaded"
    return f"{whole_duration(xid.age_seconds)} ago" if xid.age_seconds is not None else "at an unknown time"


def _and_more(xids: list[Xid]) -> str:
    return f" (and {len(xids) - 1} more)" if len(xids) > 1 else ""


def xid_text(xid: Xid) -> str:
    fact = None if xid.is_switch else xid_facts().get(xid.code)
    name = fact.name if fact else xid.text[:80]
    return f"{'SXID' if xid.is_switch else 'XID'} {xid.code}, {name}"


def _buses(xids: Iterable[Xid]) -> list[str]:
    return list(dict.fromkeys(xid.bus_id for xid in xids))


def _labels(cards: list[GpuState]) -> str:
    return "GPU " + ", ".join(str(card.index) for card in cards)


def _finding(
    check: str, severity: Severity, evidence: str, remedy: str = "", action: HealthAction | Literal[""] = ""
) -> PreflightFinding:
    return PreflightFinding("infrastructure", check, severity, evidence, remedy, action=action)
