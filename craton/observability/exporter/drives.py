"""Disk metrics: diskstats under node_exporter's names, and the SMART log of NVMe drives where readable."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from collections.abc import Iterator

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample

SMART_SECONDS = 60.0  # the drive's controller answers between reads and writes
SECTOR_BYTES = 512  # the unit of diskstats, independent of the disk's sector size
_LEFT_OUT = re.compile(r"(loop|ram|fd|sr|zram)\d+")
# Columns of diskstats after the name (Documentation/admin-guide/iostats.rst) → family and factor
COLUMNS: dict[int, tuple[str, float]] = {
    0: ("node_disk_reads_completed_total", 1),
    2: ("node_disk_read_bytes_total", SECTOR_BYTES),
    3: ("node_disk_read_time_seconds_total", 1e-3),
    4: ("node_disk_writes_completed_total", 1),
    6: ("node_disk_written_bytes_total", SECTOR_BYTES),
    7: ("node_disk_write_time_seconds_total", 1e-3),
    8: ("node_disk_io_now", 1),
    9: ("node_disk_io_time_seconds_total", 1e-3),
    10: ("node_disk_io_time_weighted_seconds_total", 1e-3),
}
SMART_BYTES = 512
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h
_GET_LOG_PAGE, _SMART_LOG = 0x02, 0x02
KELVIN = 273


class _AdminCommand(ctypes.Structure):
    """struct nvme_admin_cmd of linux/nvme_ioctl.h."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("rsvd1", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32),
        ("data_len", ctypes.c_uint32),
        *((f"cdw{number}", ctypes.c_uint32) for number in range(10, 16)),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    )


class DriveCollector(Collector):
    name = "drives"

    def __init__(self, root: NodeRoot) -> None:
        self._root = root
        self._looked = float("-inf")
        self._smart: list[Sample] = []

    def collect(self, now: float) -> Iterator[Sample]:
        disks = set(self._root.names("sys/block"))
        yield from self.guarded(disk_samples(self._root.read("proc/diskstats"), disks))
        if now - self._looked >= SMART_SECONDS:
            self._looked = now
            drives = [name for name in self._root.names("sys/class/nvme") if re.fullmatch(r"nvme\d+", name)]
            self._smart = [sample for name in drives for sample in smart_samples(name, smart_page(self._root, name))]
        yield from self._smart


def disk_samples(text: str, whole: set[str]) -> Iterator[Sample]:
    """Yield samples of whole disks only: a disk's counters include its partitions."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 14 or fields[2] not in whole or _LEFT_OUT.fullmatch(fields[2]):
            continue
        for column, (name, factor) in COLUMNS.items():
            yield name, (fields[2],), int(fields[3 + column]) * factor


def smart_page(root: NodeRoot, drive: str) -> bytes:
    """Return the SMART log of a drive, from its controller (needs root) or recorded in an image; empty if not
    available."""
    if root.is_recorded:
        return root.bytes_of(f"commands/smart-{drive}.bin")
    page = ctypes.create_string_buffer(SMART_BYTES)
    command = _AdminCommand(
        opcode=_GET_LOG_PAGE,
        nsid=0xFFFFFFFF,  # of the whole controller
        addr=ctypes.addressof(page),
        data_len=SMART_BYTES,
        cdw10=_SMART_LOG | (SMART_BYTES // 4 - 1) << 16,
        timeout_ms=1000,
    )
    try:
        descriptor = os.open(root.at(f"dev/{drive}"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return page.raw if fcntl.ioctl(descriptor, _ADMIN_COMMAND, command) == 0 else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def smart_samples(drive: str, page: bytes) -> Iterator[Sample]:
    """Parse the log page (NVM Express base specification, SMART / Health Information)."""
    kelvin = int.from_bytes(page[1:3], "little")
    # Controllers of network volumes (EBS) return a page of zeros: spare blocks are then unknown, not used up.
    if len(page) < SMART_BYTES or kelvin == 0:
        return
    labels = (drive,)
    yield "nvme_critical_warning_total", labels, page[0]
    yield "nvme_temperature_celsius", labels, kelvin - KELVIN
    yield "nvme_available_spare_ratio", labels, page[3] / 100
    yield "nvme_available_spare_threshold_ratio", labels, page[4] / 100
    yield "nvme_percentage_used_ratio", labels, page[5] / 100
    yield "nvme_unsafe_shutdowns_total", labels, int.from_bytes(page[144:160], "little")
    yield "nvme_media_errors_total", labels, int.from_bytes(page[160:176], "little")
