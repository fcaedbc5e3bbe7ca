"""A node as data that tests change, and the tree of files that it is written as."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

KIB = 1024
GIB = 2**30


@dataclass
class Card:
    """One GPU; `xml` has what differs from a healthy card, by its path in nvidia-smi's XML."""

    name: str
    bus: str  # 0000:53:00.0
    memory_mib: int
    power_watts: int
    links: list[float] = field(default_factory=lambda: [26.562] * 18)
    pcie: int = 5
    fabric: bool = True
    xml: dict[str, str] = field(default_factory=dict)

    @property
    def uuid(self) -> str:
        return f"GPU-{self.bus.replace(':', '').replace('.', '')}"


@dataclass
class Port:
    """One entry of /sys/class/infiniband."""

    name: str
    driver: str = "efa"
    state: str = "4: ACTIVE"
    rate: str = "100 Gb/sec (4X EDR)"
    layer: str = "Unspecified"
    counters: dict[str, int] = field(default_factory=dict)
    visible: bool = True  # in /dev/infiniband


@dataclass
class Node:
    product: str = ""
    vendor: str = "Amazon EC2"
    name: str = "ip-10-0-0-7"
    cards: list[Card] = field(default_factory=list)
    hidden_cards: list[str] = field(default_factory=list)  # on the bus, unknown to the driver
    ports: list[Port] = field(default_factory=list)
    driver: str = "580.95.05"
    driver_cuda: str = "13.0"
    open_modules: bool = True
    memory_gib: int = 2048
    processors: int = 192
    numa_nodes: int = 2
    drives: int = 8
    drive_model: str = "Amazon EC2 NVMe Instance Storage"
    drives_mounted: bool = True
    shared_memory_kib: int = 1024 * 2**20
    limits: dict[str, str] = field(default_factory=lambda: {"locked memory": "unlimited", "open files": "1048576"})
    hugepages: int = 5128
    kernel: str = "6.8.0-1040-aws"
    installer: str = "1.44.0"
    libfabric: str = "2.3.1amzn3.0"
    plugin: str = "1.17.2"  # "": not installed
    plugin_on_path: bool = True
    modules: dict[str, str] = field(default_factory=dict)  # name → version, loaded
    devices: list[str] = field(default_factory=list)  # more of /dev
    packages: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lustre: bool = False
    lustre_efa: int = 0  # EFA interfaces bound to LNet
    lustre_service: bool = False
    log: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # what nothing above says; wins
    removed: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        texts = {**self._host(), **self._gpus(), **self._network(), **self._disks(), **self._software(), **self.files}
        for path, text in texts.items():
            if path not in self.removed:
                place = folder / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text + "\n", encoding="utf-8")
        for port in self.ports:
            link = folder / f"sys/class/infiniband/{port.name}/device/driver"
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(f"../../../bus/pci/drivers/{port.driver}", link)
        return folder

    def _host(self) -> dict[str, str]:
        limits = [f"{f'Max {name}':<26}{value:<21}{value:<21}units" for name, value in self.limits.items()]
        meminfo = [
            f"MemTotal:       {self.memory_gib * 2**20} kB",
            f"HugePages_Total:    {self.hugepages}",
            "Hugepagesize:       2048 kB",
        ]
        texts = {
            "proc/sys/kernel/hostname": self.name,
            "proc/sys/kernel/osrelease": self.kernel,
            "proc/sys/kernel/numa_balancing": "0",
            "proc/meminfo": "\n".join(meminfo),
            "proc/self/limits": "\n".join(["Limit                     Soft Limit           Hard Limit", *limits]),
            "proc/self/cgroup": "0::/",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"',
            "sys/devices/system/cpu/online": f"0-{self.processors - 1}",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
            "commands/chronyc.txt": "Reference ID    : A9FEA97B\nStratum         : 4\nLeap status     : Normal",
            "commands/dmesg.txt": "\n".join(["[    0.000000] Linux version", *self.log]),
            **{f"sys/devices/system/node/node{number}/cpulist": "0-95" for number in range(self.numa_nodes)},
        }
        if self.product:
            texts |= {"sys/class/dmi/id/product_name": self.product, "sys/class/dmi/id/sys_vendor": self.vendor}
        return texts

    def _gpus(self) -> dict[str, str]:
        buses = [*(card.bus for card in self.cards), *self.hidden_cards]
        texts = {f"sys/bus/pci/devices/{bus}/vendor": "0x10de" for bus in buses}
        texts |= {f"sys/bus/pci/devices/{bus}/class": "0x030200" for bus in buses}
        if not buses:
            return texts
        flavour = "NVIDIA UNIX Open Kernel Module" if self.open_modules else "NVIDIA UNIX x86_64 Kernel Module"
        texts["proc/driver/nvidia/version"] = f"NVRM version: {flavour} for x86_64  {self.driver}  Release Build"
        cards = "".join(smi_card(card) for card in self.cards)
        head = f"<driver_version>{self.driver}</driver_version><cuda_version>{self.driver_cuda}</cuda_version>"
        texts["commands/nvidia-smi.txt"] = (
            f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>{head}'
            f"<attached_gpus>{len(self.cards)}</attached_gpus>{cards}</nvidia_smi_log>"
        )
        lines = []
        for number, card in enumerate(self.cards):
            lines.append(f"GPU {number}: {card.name} (UUID: {card.uuid})")
            lines += [
                f"\t Link {link}: {f'{rate:.3f} GB/s' if rate else '<inactive>'}"
                for link, rate in enumerate(card.links)
            ]
        texts["commands/nvlink.txt"] = "\n".join(lines)
        return texts

    def _network(self) -> dict[str, str]:
        texts = {f"sys/module/{name}/version": version for name, version in self.modules.items()}
        texts |= {f"dev/{name}": "" for name in self.devices}
        domains = []
        for number, port in enumerate(self.ports):
            place = f"sys/class/infiniband/{port.name}/ports/1"
            texts |= {
                f"{place}/state": port.state,
                f"{place}/rate": port.rate,
                f"{place}/link_layer": port.layer,
                f"sys/class/infiniband_verbs/uverbs{number}/ibdev": port.name,
                **{f"{place}/hw_counters/{name}": str(value) for name, value in port.counters.items()},
            }
            if port.visible:
                texts[f"dev/infiniband/uverbs{number}"] = ""
            if port.driver == "efa" and port.visible:
                domains += [f"{port.name}-rdm", f"{port.name}-dgrm"]
        if any(port.driver == "efa" for port in self.ports) or self.installer:
            answer = [f"provider: efa\n    fabric: efa\n    domain: {domain}\n    version: 203.0" for domain in domains]
            texts["commands/fi_info.txt"] = "\n".join(answer) or "exit 61\nfi_getinfo: -61 (No data available)"
        return texts

    def _disks(self) -> dict[str, str]:
        mounts = ["/dev/root / ext4 rw,relatime 0 0", f"tmpfs /dev/shm tmpfs rw,size={self.shared_memory_kib}k 0 0"]
        texts = {}
        for number in range(1, self.drives + 1):
            place = f"sys/block/nvme{number}n1"
            texts |= {f"{place}/size": str(3_800_000_000_000 // 512), f"{place}/device/model": self.drive_model}
            if self.drives_mounted:
                texts[f"{place}/holders/md0"] = ""
        if self.drives and self.drives_mounted:
            mounts.append("/dev/md0 /local_scratch xfs rw,noatime 0 0")
            texts["sys/block/md0/size"] = "1"
        if self.lustre:
            mounts.append("10.0.1.5@tcp:/abcdefgh /fsx lustre rw,noatime,flock 0 0")
            texts |= {"sys/fs/lustre/version": "2.15.6_206_gabc", "commands/lnet.txt": self._lnet()}
        if self.lustre_service:
            texts["etc/systemd/system/configure-efa-fsx-lustre-client.service"] = "[Unit]"
        texts["proc/self/mounts"] = "\n".join(mounts)
        return texts

    def _lnet(self) -> str:
        lines = ["net:", "    - net type: lo", "      local NI(s):", "        - nid: 0@lo", "          status: up"]
        found = {"tcp": ["enp1s0"], "efa": [port.name for port in self.ports[: self.lustre_efa]]}
        for network, devices in found.items():
            if devices:
                lines += [f"    - net type: {network}", "      local NI(s):"]
            for number, device in enumerate(devices):
                lines += [f"        - nid: 10.0.0.{number}@{network}", "          status: up"]
                lines += ["          interfaces:", f"              0: {device}"]
        return "\n".join(lines)

    def _software(self) -> dict[str, str]:
        texts = {
            "commands/packages.txt": "\n".join(f"{name}=={version}" for name, version in self.packages.items()),
            "commands/environment.txt": "\n".join(f"{name}={value}" for name, value in self.environment.items()),
        }
        listed = ["\tlibc.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6"]
        if self.installer:
            packages = [f"# EFA installer version: {self.installer}", "# Packages installed:", "efa_3.0.0-1_amd64"]
            packages += [f"libfabric-aws_{self.libfabric}_amd64"]
            if self.plugin:
                packages.append(f"libnccl-ofi_{self.plugin}-1_amd64")
                texts["opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"] = ""
            texts["opt/amazon/efa_installed_packages"] = "\n".join(packages)
            if self.plugin and self.plugin_on_path:
                place = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"
                listed.append(f"\tlibnccl-net.so (libc6,x86-64) => {place}")
        texts["commands/ldconfig.txt"] = "\n".join(listed)
        return texts


def smi_card(card: Card) -> str:
    """One `<gpu>` of `nvidia-smi -q -x`, of a healthy idle card but for `card.xml`."""
    values = {
        "product_name": card.name,
        "persistence_mode": "Enabled",
        "mig_mode/current_mig": "Disabled",
        "uuid": card.uuid,
        "gpu_recovery_action": "None",
        "pci/pci_bus_id": f"0000{card.bus.upper()}",
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen": str(card.pcie),
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen": str(card.pcie),
        "pci/pci_gpu_link_info/link_widths/max_link_width": "16x",
        "pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
        "clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
        "clocks_event_reasons/clocks_event_reason_sw_power_cap": "Not Active",
        "clocks_event_reasons/clocks_event_reason_hw_slowdown": "Not Active",
        "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Not Active",
        "clocks_event_reasons/clocks_event_reason_sw_thermal_slowdown": "Not Active",
        "fb_memory_usage/total": f"{card.memory_mib} MiB",
        "ecc_mode/current_ecc": "Enabled",
        "ecc_errors/volatile/sram_correctable": "0",
        "ecc_errors/volatile/sram_uncorrectable_parity": "0",
        "ecc_errors/volatile/sram_uncorrectable_secded": "0",
        "ecc_errors/volatile/dram_correctable": "0",
        "ecc_errors/volatile/dram_uncorrectable": "0",
        "ecc_errors/aggregate/dram_uncorrectable": "0",
        "ecc_errors/aggregate/sram_threshold_exceeded": "No",
        "ecc_errors/channel_repair_pending": "No",
        "remapped_rows/remapped_row_corr": "0",
        "remapped_rows/remapped_row_unc": "0",
        "remapped_rows/remapped_row_pending": "No",
        "remapped_rows/remapped_row_failure": "No",
        "temperature/gpu_temp": "31 C",
        "gpu_power_readings/current_power_limit": f"{card.power_watts}.00 W",
        "gpu_power_readings/default_power_limit": f"{card.power_watts}.00 W",
        "clocks/sm_clock": "345 MHz",
        "max_clocks/sm_clock": "1980 MHz",
        "fabric/state": "Completed" if card.fabric else "N/A",
        "fabric/status": "Success" if card.fabric else "N/A",
        **card.xml,
    }
    return f'<gpu id="0000{card.bus.upper()}">{_nested(values)}</gpu>'


def _nested(values: dict[str, str]) -> str:
    """Paths to elements inside elements, in the order they first come."""
    inside: dict[str, dict[str, str]] = {}
    for path, value in values.items():
        head, _, rest = path.partition("/")
        inside.setdefault(head, {})[rest] = value
    parts = []
    for name, found in inside.items():
        body = found[""] if "" in found else _nested(found)
        parts.append(f"<{name}>{body}</{name}>")
    return "".join(parts)
