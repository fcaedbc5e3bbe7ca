"""Storage of a node: local NVMe drives and their mounts, shared memory, the Lustre client and the network interfaces
bound to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

from craton.infrastructure.probes.root import NodeRoot

SECTOR_BYTES = 512  # unit of /sys/block/*/size, whatever the drive's own sector size
EFA_LUSTRE_SERVICE = "etc/systemd/system/configure-efa-fsx-lustre-client.service"


@dataclass(frozen=True)
class Mount:
    source: str
    path: str
    kind: str
    options: tuple[str, ...]

    def option(self, name: str) -> str:
        """`size=65536k` → 65536k."""
        return next((option.partition("=")[2] for option in self.options if option.startswith(f"{name}=")), "")


@dataclass(frozen=True)
class Drive:
    """One NVMe drive that does not hold the operating system."""

    name: str
    model: str
    size_bytes: int
    mounted_at: tuple[str, ...]  # also through a RAID or a logical volume


@dataclass(frozen=True)
class LustreInterface:
    """One network interface of LNet."""

    network: str  # tcp, efa, o2ib
    nid: str
    device: str
    status: str

    @property
    def is_up(self) -> bool:
        return self.status == "up"


@dataclass(frozen=True)
class LustreClient:
    version: str
    mounts: tuple[Mount, ...]
    interfaces: tuple[LustreInterface, ...]
    interfaces_told: bool  # whether lnetctl answered
    wants_efa: bool  # this node was set up for Lustre over EFA


@dataclass(frozen=True)
class Disks:
    mounts: tuple[Mount, ...]
    drives: tuple[Drive, ...]
    shared_memory_bytes: int | None
    lustre: LustreClient

    def mount_of(self, path: str) -> Mount | None:
        """Return the mount of a path: the deepest one above it, and the last of several at the same place."""
        holding = [mount for mount in self.mounts if f"{path}/".startswith(f"{mount.path.rstrip('/')}/")]
        return max(reversed(holding), key=lambda mount: len(mount.path), default=None)


def probe_disks(root: NodeRoot) -> Disks:
    mounts = read_mounts(root)
    return Disks(
        mounts=mounts,
        drives=tuple(_drives(root, mounts)),
        shared_memory_bytes=_shared_memory(root, mounts),
        lustre=_lustre(root, mounts),
    )


def read_mounts(root: NodeRoot) -> tuple[Mount, ...]:
    # If a node's root is mounted here, `self` is a process of this container; process 1 has the node's own table.
    tables = ("proc/self/mounts", "proc/mounts") if root.is_live else ("proc/1/mounts", "proc/self/mounts")
    text = next(filter(None, map(root.read, tables)), "")
    rows = [line.split() for line in text.splitlines()]
    return tuple(
        Mount(_unescaped(row[0]), _unescaped(row[1]), row[2], tuple(row[3].split(","))) for row in rows if len(row) >= 4
    )


def _drives(root: NodeRoot, mounts: tuple[Mount, ...]) -> list[Drive]:
    result = []
    for name in root.names("sys/block"):
        if not re.fullmatch(r"nvme\d+n\d+", name):
            continue
        model = root.read(f"sys/block/{name}/device/model")
        at = _mounted_at(root, name, mounts)
        if "/" in at or "Elastic Block Store" in model:
            continue
        result.append(Drive(name, model, (root.number(f"sys/block/{name}/size") or 0) * SECTOR_BYTES, at))
    return result


def _mounted_at(root: NodeRoot, drive: str, mounts: tuple[Mount, ...]) -> tuple[str, ...]:
    """Return where the drive, one of its partitions, or a RAID or volume on either is mounted."""
    blocks = [drive, *(name for name in root.names(f"sys/block/{drive}") if name.startswith(f"{drive}p"))]
    for block in blocks:  # grows during iteration: a RAID of partitions under a logical volume
        folder = f"sys/block/{block}" if root.exists(f"sys/block/{block}") else f"sys/block/{drive}/{block}"
        blocks += [name for name in root.names(f"{folder}/holders") if name not in blocks]
    sources = {f"/dev/{block}" for block in blocks}
    sources |= {f"/dev/mapper/{name}" for block in blocks if (name := root.read(f"sys/block/{block}/dm/name"))}
    # /dev/md/NAME is a link to /dev/md127, and the mount table may have either.
    sources |= {f"/dev/md/{name}" for block in blocks if (name := root.read(f"sys/block/{block}/md/array_name"))}
    return tuple(mount.path for mount in mounts if mount.source in sources)


def _shared_memory(root: NodeRoot, mounts: tuple[Mount, ...]) -> int | None:
    mount = next((mount for mount in reversed(mounts) if mount.path == "/dev/shm"), None)
    if mount is None:
        return None
    size = re.fullmatch(r"(\d+)([kmg%]?)", mount.option("size"))
    total = re.search(r"MemTotal:\s+(\d+) kB", root.read("proc/meminfo"))
    memory_bytes = int(total[1]) * 1024 if total else 0
    if size is None:
        return memory_bytes // 2 or None  # tmpfs's default size
    number, unit = int(size[1]), size[2]
    if unit == "%":
        return memory_bytes * number // 100
    return int(number * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[unit])


def _lustre(root: NodeRoot, mounts: tuple[Mount, ...]) -> LustreClient:
    answer = root.ask("lnet")
    asked = root.ask("lctl")
    return LustreClient(
        version=root.read("sys/fs/lustre/version") or (asked.first_line if asked.worked else ""),
        mounts=tuple(mount for mount in mounts if mount.kind == "lustre"),
        interfaces=tuple(_interfaces(answer.text)) if answer.worked else (),
        interfaces_told=answer.worked,
        wants_efa=root.exists(EFA_LUSTRE_SERVICE) or root.exists("sys/module/kefalnd"),
    )


def _interfaces(text: str) -> list[LustreInterface]:
    """Parse the YAML of `lnetctl net show`; anything else has no interfaces."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return []
    nets = document.get("net") if isinstance(document, dict) else None
    result = []
    for net in nets if isinstance(nets, list) else []:
        kind = str(net.get("net type", "")) if isinstance(net, dict) else ""
        for interface in (net.get("local NI(s)") or []) if kind not in ("", "lo") else []:
            devices = interface.get("interfaces") or {}
            device = str(next(iter(devices.values()), "")) if isinstance(devices, dict) else ""
            result.append(
                LustreInterface(kind, str(interface.get("nid", "")), device, str(interface.get("status", "")))
            )
    return result


def _unescaped(text: str) -> str:
    """A space in a path is \\040 in the mount table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
