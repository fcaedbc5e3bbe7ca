"""The network between nodes: InfiniBand and EFA devices in sysfs, libfabric's provider, NCCL's plugin for it, and
network access to GPU memory (GDRCopy, peer memory or dma-buf, GPUDirect Storage).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from craton.infrastructure.probes.root import NodeRoot

DEVICES = "sys/class/infiniband"
PLUGIN_FOLDERS = (
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib64",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "opt/amazon/aws-ofi-nccl/lib",
    "opt/aws-ofi-nccl/lib",
    "opt/aws-ofi-nccl/install/lib",
    "usr/local/lib",
)
SYSTEM_FOLDERS = ("usr/local/lib", "usr/local/lib64", "usr/lib", "usr/lib64", "lib", "lib64")
_PLUGIN = re.compile(r"libnccl-net(-ofi)?\.so(\.\d+)*")
_LISTED = re.compile(r"^\s*(libnccl-net(?:-ofi)?\.so[.\d]*) .*=> (\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class FabricDevice:
    """One entry of /sys/class/infiniband."""

    name: str
    driver: str  # efa, mlx5_core, ...
    state: str  # ACTIVE, DOWN, ...
    gigabits_per_second: float  # 0: unknown
    link_layer: str  # InfiniBand, Ethernet, Unspecified (EFA)
    uverbs: str  # its character device, uverbs3
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa"

    @property
    def is_active(self) -> bool:
        return self.state in ("ACTIVE", "")


@dataclass(frozen=True)
class Libfabric:
    """Output of `fi_info -p efa`."""

    is_there: bool
    domains: tuple[str, ...] = ()  # one per device
    error: str = ""


@dataclass(frozen=True)
class Fabric:
    devices: tuple[FabricDevice, ...]
    visible_uverbs: tuple[str, ...]  # in /dev/infiniband
    libfabric: Libfabric
    plugins: tuple[str, ...]  # paths of aws-ofi-nccl
    foreign_plugins: tuple[str, ...]  # other libnccl-net.so, such as HPC-X's
    loaded_plugin: str  # what the loader gives NCCL: NCCL_NET_PLUGIN, LD_LIBRARY_PATH, ldconfig; "": none
    plugin_is_found: bool  # whether that is aws-ofi-nccl
    versions: dict[str, str]  # efa_driver, efa_installer, libfabric, aws_ofi_nccl, gdrcopy, nvidia_fs; if installed
    gdrcopy_device: bool
    peer_memory: bool  # the module nvidia_peermem
    efa_peer_to_peer: str  # the EFA driver's report on GPU memory; "" without one

    @property
    def efa(self) -> tuple[FabricDevice, ...]:
        return tuple(device for device in self.devices if device.is_efa)

    @property
    def infiniband(self) -> tuple[FabricDevice, ...]:
        return tuple(device for device in self.devices if not device.is_efa)


def probe_fabric(root: NodeRoot) -> Fabric:
    uverbs = {root.read(f"sys/class/infiniband_verbs/{name}/ibdev"): name for name in _uverbs(root)}
    devices = tuple(_device(root, name, uverbs.get(name, "")) for name in root.names(DEVICES))
    versions = _versions(root)
    there = [*dict.fromkeys([*_plugins(root), *_listed(root)])]
    loaded = _loaded(root, there)
    there += [loaded] if loaded and loaded not in there else []
    own = tuple(path for path in there if _is_ofi(root, path, "aws_ofi_nccl" in versions))
    return Fabric(
        devices=devices,
        visible_uverbs=tuple(name for name in root.names("dev/infiniband") if name.startswith("uverbs")),
        libfabric=_libfabric(root),
        plugins=own,
        foreign_plugins=tuple(path for path in there if path not in own),
        loaded_plugin=loaded,
        plugin_is_found=loaded in own,
        versions=versions,
        gdrcopy_device=root.exists("dev/gdrdrv"),
        peer_memory=root.exists("sys/module/nvidia_peermem"),
        efa_peer_to_peer=_peer_to_peer(root, devices),
    )


def _uverbs(root: NodeRoot) -> list[str]:
    return [name for name in root.names("sys/class/infiniband_verbs") if name.startswith("uverbs")]


def _device(root: NodeRoot, name: str, uverbs: str) -> FabricDevice:
    port = f"{DEVICES}/{name}/ports/1"
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", root.read(f"{port}/rate"))
    counters = {}
    for counter in root.names(f"{port}/hw_counters"):
        value = root.number(f"{port}/hw_counters/{counter}")
        if value is not None:
            counters[counter] = value
    return FabricDevice(
        name=name,
        driver=root.link(f"{DEVICES}/{name}/device/driver"),
        state=root.read(f"{port}/state").partition(":")[2].strip(),
        gigabits_per_second=float(rate[1]) if rate else 0.0,
        link_layer=root.read(f"{port}/link_layer"),
        uverbs=uverbs,
        counters=counters,
    )


def _libfabric(root: NodeRoot) -> Libfabric:
    answer = root.ask("fi_info")
    if not answer.is_there:
        return Libfabric(False, error="fi_info is not installed")
    # rdmap16s27-rdm and rdmap16s27-dgrm are two endpoints of one device.
    domains = {
        re.sub(r"-(rdm|dgrm)$", "", name) for name in re.findall(r"^\s*domain: (\S+)", answer.text, re.MULTILINE)
    }
    if domains:
        return Libfabric(True, tuple(sorted(domains)))
    return Libfabric(True, error=answer.first_line or f"fi_info ended with {answer.code}")


def _plugins(root: NodeRoot) -> Iterator[str]:
    for folder in dict.fromkeys([*PLUGIN_FOLDERS, *_library_path(root)]):
        for name in root.names(folder):
            if _PLUGIN.fullmatch(name):
                yield f"/{folder}/{name}"


def _library_path(root: NodeRoot) -> list[str]:
    listed = root.environment.get("LD_LIBRARY_PATH", "").split(":")
    return [folder.strip("/") for folder in listed if folder.startswith("/")]


def _listed(root: NodeRoot) -> list[str]:
    return [path for _, path in _LISTED.findall(root.ask("ldconfig").text)]


def _loaded(root: NodeRoot, plugins: list[str]) -> str:
    """Return the library that NCCL opens: the one that is named, else the first on the loader's search path."""
    named = root.environment.get("NCCL_NET_PLUGIN", "")
    if named.startswith("/"):
        return named if root.exists(named) else ""
    if named.lower() == "none":
        return ""
    names = [f"libnccl-net-{named}.so", named] if named else []
    on_path = [plugin for folder in _library_path(root) for plugin in plugins if _folder(plugin) == folder]
    ways = [*on_path, *_listed(root)]
    for name in [*names, "libnccl-net.so"]:
        if result := next((way for way in ways if Path(way).name == name), ""):
            return result
    return ""


def _is_ofi(root: NodeRoot, plugin: str, is_installed: bool) -> bool:
    """Return whether the plugin is aws-ofi-nccl: by its name, folder, neighbouring files or link target. In a system
    folder, where these do not identify it, the installer's record decides."""
    folder = _folder(plugin)
    message = f"{plugin} {root.target(plugin)}"
    if "ofi-nccl" in message or "libnccl-net-ofi" in message or root.exists(f"{folder}/libnccl-net-ofi.so"):
        return True
    return is_installed and (folder in SYSTEM_FOLDERS or folder.endswith("-linux-gnu"))


def _folder(path: str) -> str:
    return str(Path(path).parent).strip("/")


def _versions(root: NodeRoot) -> dict[str, str]:
    installed = root.read("opt/amazon/efa_installed_packages")
    versions = {
        "efa_driver": root.read("sys/module/efa/version"),
        "efa_installer": _first(r"EFA installer version:\s*(\d[\d.]*)", installed),
        "libfabric": _first(r"libfabric[\w]*-?(?:aws)?[-_](\d+\.\d+(?:\.\d+)?)", installed),
        "aws_ofi_nccl": _first(r"(?:libnccl-ofi|aws-ofi-nccl)\w*[-_](\d+\.\d+(?:\.\d+)?)", installed),
        "gdrcopy": root.read("sys/module/gdrdrv/version"),
        "nvidia_fs": root.read("sys/module/nvidia_fs/version"),
    }
    return {name: version.partition("g")[0].rstrip("-+") for name, version in versions.items() if version}


def _peer_to_peer(root: NodeRoot, devices: tuple[FabricDevice, ...]) -> str:
    return next((answer for device in devices if (answer := root.read(f"{DEVICES}/{device.name}/device/p2p"))), "")


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
