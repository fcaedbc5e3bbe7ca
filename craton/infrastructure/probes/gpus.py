"""The GPUs of a node as reported by `nvidia-smi -q -x` and `nvidia-smi nvlink --status`, and as seen on the PCI bus.

A field that a driver does not report is None or empty, never zero: "no errors" and "unknown" stay different.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from craton.infrastructure.probes.root import NodeRoot, ToolOutput

MEBIBYTE = 2**20
NVIDIA, GPU_CLASSES = "0x10de", ("0x0302", "0x0300")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_UNCORRECTABLE = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
_CORRECTABLE = ("sram_correctable", "dram_correctable")


@dataclass(frozen=True)
class Nvlink:
    number: int
    gigabytes_per_second: float  # 0: inactive

    @property
    def is_up(self) -> bool:
        return self.gigabytes_per_second > 0


@dataclass(frozen=True)
class GpuState:
    """One GPU."""

    index: int
    name: str  # "NVIDIA H200"
    uuid: str
    bus_id: str  # 0000:53:00.0
    memory_bytes: float | None
    persistence: bool | None
    mig: bool
    ecc: bool | None
    volatile_uncorrectable: int | None  # ECC errors since the driver was loaded
    volatile_correctable: int | None
    aggregate_uncorrectable: int | None  # over the GPU's lifetime
    sram_threshold_exceeded: bool
    remap_pending: bool
    remap_failed: bool
    repair_pending: bool  # of a memory channel or a TPC, on Blackwell
    unrepairable: bool
    remapped_rows: int | None
    throttle: tuple[str, ...]  # active reasons: hw_thermal_slowdown, sw_power_cap, ...
    is_idle: bool
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    temperature_celsius: float | None
    power_limit_watts: float | None
    default_power_limit_watts: float | None
    pcie_generation: int | None
    max_pcie_generation: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    recovery_action: str  # None, Reset, Reboot, ...; "" if the driver does not report it
    fabric_state: str  # Completed, In Progress, ...; "" without an NVSwitch
    fabric_status: str
    nvlinks: tuple[Nvlink, ...] = ()

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.bus_id})"

    @property
    def is_clean(self) -> bool:
        """Whether the driver responds for this GPU and reports nothing that needs a reset or a replacement."""
        return (
            self.memory_bytes is not None
            and self.recovery_action in ("", "None")
            and not self.volatile_uncorrectable
            and not (self.remap_pending or self.remap_failed or self.repair_pending or self.unrepairable)
            and not self.sram_threshold_exceeded
            and self.fabric_state in ("", "Completed")
            and all(link.is_up for link in self.nvlinks)
        )


@dataclass(frozen=True)
class Gpus:
    """All GPUs of a node, and whether the driver responds."""

    on_bus: tuple[str, ...]  # PCI addresses of NVIDIA GPUs, driver or not
    cards: tuple[GpuState, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""  # the newest that this driver supports
    open_modules: bool = False  # NVIDIA's open kernel modules, which export memory as dma-buf
    error: str = ""  # why nvidia-smi failed
    driver_loaded: bool = False
    nvlink_told: bool = False  # whether the link status could be queried


def probe_gpus(root: NodeRoot) -> Gpus:
    on_bus = tuple(_on_bus(root))
    version = root.read("proc/driver/nvidia/version")
    answer = root.ask("nvidia-smi")
    gpus = Gpus(
        on_bus=on_bus,
        driver_loaded=bool(version),
        open_modules="open kernel module" in version.lower(),
        driver_version=_first(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", version),
    )
    document, error = _document(answer)
    if document is None:
        return replace(gpus, error=error)
    links = root.ask("nvlink")
    by_card = _links(links.text) if links.worked else {}
    cards = tuple(_card(number, gpu, by_card) for number, gpu in enumerate(document.findall("gpu")))
    return replace(
        gpus,
        cards=cards,
        driver_version=_text(document, "driver_version") or gpus.driver_version,
        cuda_version=_text(document, "cuda_version"),
        nvlink_told=links.worked,
    )


def _on_bus(root: NodeRoot) -> list[str]:
    folder = "sys/bus/pci/devices"
    return [
        name
        for name in root.names(folder)
        if root.read(f"{folder}/{name}/vendor") == NVIDIA
        and root.read(f"{folder}/{name}/class").startswith(GPU_CLASSES)
    ]


def _document(answer: ToolOutput) -> tuple[ElementTree.Element | None, str]:
    if not answer.is_there:
        return None, "nvidia-smi is not installed"
    if answer.timed_out:
        return None, "nvidia-smi timed out"
    if not answer.worked:
        return None, answer.first_line or f"nvidia-smi exited with {answer.code}"
    try:
        return ElementTree.fromstring(answer.text), ""
    except ElementTree.ParseError as error:
        return None, f"nvidia-smi -q -x is not XML ({error}): {answer.first_line[:80]}"


def _card(index: int, gpu: ElementTree.Element, links: dict[str, tuple[Nvlink, ...]]) -> GpuState:
    uuid = _text(gpu, "uuid")
    pcie = "pci/pci_gpu_link_info"
    reasons = gpu.find("clocks_event_reasons")
    if reasons is None:
        reasons = gpu.find("clocks_throttle_reasons")  # before driver 535
    active = tuple(
        re.sub(r"^clocks_(event|throttle)_reason_", "", item.tag)
        for item in (reasons if reasons is not None else ())
        if (item.text or "").strip() == "Active"
    )
    return GpuState(
        index=index,
        name=_text(gpu, "product_name"),
        uuid=uuid,
        bus_id=_short_bus(_text(gpu, "pci/pci_bus_id") or gpu.get("id", "")),
        memory_bytes=_scaled(_number(gpu, "fb_memory_usage/total"), MEBIBYTE),
        persistence=_flag(gpu, "persistence_mode", "Enabled"),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        ecc=_flag(gpu, "ecc_mode/current_ecc", "Enabled"),
        volatile_uncorrectable=_total(gpu, "ecc_errors/volatile", _UNCORRECTABLE),
        volatile_correctable=_total(gpu, "ecc_errors/volatile", _CORRECTABLE),
        aggregate_uncorrectable=_total(gpu, "ecc_errors/aggregate", _UNCORRECTABLE),
        sram_threshold_exceeded=_says_yes(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        remap_pending=_says_yes(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_says_yes(gpu, "remapped_rows/remapped_row_failure"),
        repair_pending=_says_yes(gpu, "ecc_errors/channel_repair_pending")
        or _says_yes(gpu, "ecc_errors/tpc_repair_pending"),
        unrepairable=_says_yes(gpu, "ecc_errors/unrepairable_memory"),
        remapped_rows=_total(gpu, "remapped_rows", ("remapped_row_corr", "remapped_row_unc")),
        throttle=tuple(reason for reason in active if reason != "gpu_idle"),
        is_idle="gpu_idle" in active,
        sm_clock_mhz=_number(gpu, "clocks/sm_clock"),
        max_sm_clock_mhz=_number(gpu, "max_clocks/sm_clock"),
        temperature_celsius=_number(gpu, "temperature/gpu_temp"),
        power_limit_watts=_number(gpu, "gpu_power_readings/current_power_limit")
        or _number(gpu, "power_readings/power_limit"),
        default_power_limit_watts=_number(gpu, "gpu_power_readings/default_power_limit")
        or _number(gpu, "power_readings/default_power_limit"),
        pcie_generation=_whole(gpu, f"{pcie}/pcie_gen/current_link_gen"),
        max_pcie_generation=_whole(gpu, f"{pcie}/pcie_gen/max_link_gen"),
        pcie_width=_whole(gpu, f"{pcie}/link_widths/current_link_width"),
        max_pcie_width=_whole(gpu, f"{pcie}/link_widths/max_link_width"),
        recovery_action=_known(_text(gpu, "gpu_recovery_action")) or _older_recovery(gpu),
        fabric_state=_known(_text(gpu, "fabric/state")),
        fabric_status=_known(_text(gpu, "fabric/status")),
        nvlinks=links.get(uuid, ()),
    )


def _links(text: str) -> dict[str, tuple[Nvlink, ...]]:
    """Return UUID → its links. A link without a rate is down, whatever its status text."""
    links_by_uuid: dict[str, list[Nvlink]] = {}
    current: list[Nvlink] = []
    for line in text.splitlines():
        if card := re.search(r"UUID:\s*([^)\s]+)", line):
            current = links_by_uuid.setdefault(card[1], [])
        elif link := re.match(r"\s*Link (\d+):\s*(.*)", line):
            rate = re.match(r"(\d+(?:\.\d+)?) GB/s", link[2])
            current.append(Nvlink(int(link[1]), float(rate[1]) if rate else 0.0))
    return {uuid: tuple(links) for uuid, links in links_by_uuid.items()}


def _older_recovery(gpu: ElementTree.Element) -> str:
    """Return the recovery action from the two fields that drivers before R565 use."""
    if _says_yes(gpu, "gpu_reset_status/reset_required"):
        return "Reset"
    return "Drain and Reset" if _says_yes(gpu, "gpu_reset_status/drain_and_reset_recommended") else ""


def _short_bus(bus_id: str) -> str:
    """Convert 00000000:53:00.0 to the form of sysfs and the kernel log: 0000:53:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus_id.lower()


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _known(text: str) -> str:
    return "" if text in ("N/A", "[N/A]") else text


def _number(element: ElementTree.Element, path: str) -> float | None:
    match = _NUMBER.match(_text(element, path))
    return float(match[0]) if match else None


def _whole(element: ElementTree.Element, path: str) -> int | None:
    number = _number(element, path)
    return None if number is None else int(number)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _total(element: ElementTree.Element, path: str, names: tuple[str, ...]) -> int | None:
    counts = [count for name in names if (count := _whole(element, f"{path}/{name}")) is not None]
    return sum(counts) if counts else None


def _flag(element: ElementTree.Element, path: str, yes: str) -> bool | None:
    text = _known(_text(element, path))
    return text == yes if text else None


def _says_yes(element: ElementTree.Element, path: str) -> bool:
    return _text(element, path) == "Yes"


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
