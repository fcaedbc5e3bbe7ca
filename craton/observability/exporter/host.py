"""Host metrics under node_exporter's names: CPUs, memory, network, pressure, clock."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator

from craton.infrastructure.probes import NodeRoot
from craton.observability.exporter.collector import Collector
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.families import FAMILIES

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
LOADS = ("node_load1", "node_load5", "node_load15")
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
STAT_ROWS = {
    "ctxt": "node_context_switches_total",
    "btime": "node_boot_time_seconds",
    "processes": "node_forks_total",
    "procs_running": "node_procs_running",
    "procs_blocked": "node_procs_blocked",
}
RECEIVED, TRANSMITTED = ("bytes", "packets", "errs", "drop"), ("bytes", "packets", "errs", "drop")
_LEFT_OUT = re.compile(r"(lo|veth.*|cali.*|docker\d*|br-.*|cni\d*|flannel.*)")
_PRESSURE = re.compile(r"^(some|full) .*total=(\d+)", re.MULTILINE)
_MEMORY = re.compile(r"^(\w+):\s+(\d+)( kB)?", re.MULTILINE)
CLOCK_OFF = 0x40  # STA_UNSYNC of adjtimex(2)
CLOCK_NANO = 0x2000  # STA_NANO


class HostCollector(Collector):
    name = "host"

    def __init__(self, root: NodeRoot) -> None:
        self._root = root

    def collect(self, now: float) -> Iterator[Sample]:
        read = self._root.read
        parts = [
            processor_samples(read("proc/stat")),
            memory_samples(read("proc/meminfo")),
            self._load(),
            counter_samples(read("proc/vmstat"), "node_vmstat_"),
            _tcp(read("proc/1/net/snmp") or read("proc/net/snmp")),
            *(pressure_samples(read(f"proc/pressure/{kind}"), kind) for kind in ("cpu", "io", "memory")),
            self._network(),
            self._memory_errors(),
            self._clock(),
        ]
        yield "node_time_seconds", (), now
        yield "node_uname_info", self._uname(), 1
        for part in parts:
            yield from self.guarded(part)

    def _load(self) -> Iterator[Sample]:
        for name, value in zip(LOADS, self._root.read("proc/loadavg").split(), strict=False):
            yield name, (), float(value)
        files = self._root.read("proc/sys/fs/file-nr").split()
        if len(files) == 3:
            yield "node_filefd_allocated", (), int(files[0])
            yield "node_filefd_maximum", (), int(files[2])

    def _network(self) -> Iterator[Sample]:
        # /proc/net is the reader's own network namespace; that of PID 1 is the node's, also from inside a container.
        text = self._root.read("proc/1/net/dev") or self._root.read("proc/net/dev")
        for device, sample in network_samples(text):
            yield sample
            if sample[0] == "node_network_receive_bytes_total":
                yield from self._interface(device)

    def _interface(self, device: str) -> Iterator[Sample]:
        folder = f"sys/class/net/{device}"
        state, speed = self._root.read(f"{folder}/operstate"), self._root.number(f"{folder}/speed")
        if state:
            yield "node_network_up", (device,), int(state == "up")
        if speed is not None and speed > 0:  # -1: the link is down, or the driver does not know
            yield "node_network_speed_bytes", (device,), speed * 1e6 / 8

    def _memory_errors(self) -> Iterator[Sample]:
        folder = "sys/devices/system/edac/mc"
        for name in self._root.names(folder):
            if re.fullmatch(r"mc\d+", name):
                for file, kind in (("ce_count", "correctable"), ("ue_count", "uncorrectable")):
                    if (count := self._root.number(f"{folder}/{name}/{file}")) is not None:
                        yield f"node_edac_{kind}_errors_total", (name.removeprefix("mc"),), count

    def _clock(self) -> Iterator[Sample]:
        if not self._root.is_recorded:
            yield from clock_samples()
        elif (tracking := self._root.ask("chronyc")).worked:
            leap = re.search(r"^Leap status\s*:\s*(.*)$", tracking.text, re.MULTILINE)
            yield "node_timex_sync_status", (), int(bool(leap and leap[1].strip() == "Normal"))

    def _uname(self) -> tuple[str, ...]:
        if not self._root.is_recorded:
            system = os.uname()
            return (system.sysname, system.release, system.version, system.machine, system.nodename, "")
        kernel = "proc/sys/kernel"
        release, version, name = (self._root.read(f"{kernel}/{file}") for file in ("osrelease", "version", "hostname"))
        return ("Linux", release, version, "", name, "")


def processor_samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        head, *fields = line.split()
        if head.startswith("cpu") and head != "cpu":
            number = head.removeprefix("cpu")
            for mode, ticks in zip(MODES, fields, strict=False):
                yield "node_cpu_seconds_total", (number, mode), int(ticks) / TICKS_PER_SECOND
        elif head in STAT_ROWS and fields:
            yield STAT_ROWS[head], (), int(fields[0])


def memory_samples(text: str) -> Iterator[Sample]:
    for name, number, unit in _MEMORY.findall(text):
        family = f"node_memory_{name}_bytes" if unit else f"node_memory_{name}"
        if family in FAMILIES:
            yield family, (), int(number) * (1024 if unit else 1)


def counter_samples(text: str, prefix: str) -> Iterator[Sample]:
    """Yield the lines `NAME NUMBER` that are known families."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if prefix + name in FAMILIES and number.isdecimal():
            yield prefix + name, (), int(number)


def pressure_samples(text: str, kind: str) -> Iterator[Sample]:
    """Parse PSI: `some` = at least one process waited, `full` = all did. Microseconds (accounting/psi.rst)."""
    for who, microseconds in _PRESSURE.findall(text):
        family = f"node_pressure_{kind}_{'waiting' if who == 'some' else 'stalled'}_seconds_total"
        if family in FAMILIES:
            yield family, (), int(microseconds) / 1e6


def network_samples(text: str) -> Iterator[tuple[str, Sample]]:
    for line in text.splitlines()[2:]:
        device, _, rest = line.partition(":")
        device, fields = device.strip(), rest.split()
        if len(fields) < 16 or _LEFT_OUT.fullmatch(device):
            continue
        for number, kind in enumerate(RECEIVED):
            yield device, (f"node_network_receive_{kind}_total", (device,), int(fields[number]))
        for number, kind in enumerate(TRANSMITTED):
            yield device, (f"node_network_transmit_{kind}_total", (device,), int(fields[8 + number]))


def _tcp(text: str) -> Iterator[Sample]:
    rows = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(rows) == 2:
        for name, value in zip(rows[0][1:], rows[1][1:], strict=False):
            if f"node_netstat_Tcp_{name}" in FAMILIES:
                yield f"node_netstat_Tcp_{name}", (), int(value)


class _Timex(ctypes.Structure):
    """The fields of struct timex (sys/timex.h) that are read, and space for the rest that the kernel writes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_samples() -> Iterator[Sample]:
    """Yield the clock's synchronization state from adjtimex; modes = 0 changes nothing and needs no privilege."""
    timex = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    if library.adjtimex(ctypes.byref(timex)) < 0:
        return
    unit = 1e-9 if timex.status & CLOCK_NANO else 1e-6
    yield "node_timex_sync_status", (), int(not timex.status & CLOCK_OFF)
    yield "node_timex_offset_seconds", (), timex.offset * unit
    yield "node_timex_maxerror_seconds", (), timex.maxerror * 1e-6


def host_name(root: NodeRoot) -> str:
    """Return the host name of the node that the root shows."""
    return root.read("proc/sys/kernel/hostname") or socket.gethostname()
