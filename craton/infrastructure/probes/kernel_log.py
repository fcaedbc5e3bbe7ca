"""Errors of the NVIDIA driver in the kernel log: XIDs of GPUs and SXIDs of NVSwitches.

XID 154 is the driver's own statement of what a GPU needs now; the newest one of a GPU overrides every table. The log is
kept until the next boot, so every entry has its age, and whether the driver has been reloaded since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from craton.infrastructure.probes.root import NodeRoot
from craton.infrastructure.probes.tables import HealthAction, xid_action

RECOVERY_CHANGED = 154
_SINCE_BOOT = re.compile(r"^\[\s*(\d+\.\d+)\]")
_LOADED = re.compile(r"NVRM: loading NVIDIA UNIX")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
_RECOVERY = re.compile(r"recovery action changed from .*? to \S+ \(([^)]*)\)", re.IGNORECASE)


@dataclass(frozen=True)
class Xid:
    bus_id: str  # 0000:53:00, as the driver writes it: without the function
    code: int
    text: str
    is_switch: bool = False  # an SXID
    age_seconds: float | None = None  # None if the log or the node does not give it
    before_reload: bool = False  # whether the driver was reloaded afterwards

    @property
    def is_fatal(self) -> bool:
        """Whether the log line itself says that it is fatal: SXIDs, and XIDs 144 to 150."""
        return re.search(r"(?<!non)(?<!non-)\bfatal\b", self.text, re.IGNORECASE) is not None

    @property
    def recovery(self) -> str:
        """The action that XID 154 requests, such as `Node Reboot Required`; "" for other XIDs."""
        match = _RECOVERY.search(self.text) if self.code == RECOVERY_CHANGED and not self.is_switch else None
        return match[1] if match else ""

    @property
    def action(self) -> HealthAction:
        """The action this XID requires by itself."""
        return xid_action(self.code, recovery=self.recovery, is_fatal=self.is_fatal, is_switch=self.is_switch)


@dataclass(frozen=True)
class KernelLog:
    is_readable: bool
    error: str = ""
    xids: tuple[Xid, ...] = ()  # oldest first


def probe_kernel_log(root: NodeRoot) -> KernelLog:
    answer = root.ask("dmesg")
    if not answer.worked:
        return KernelLog(False, answer.first_line or "dmesg is not installed")
    uptime = re.match(r"\d+(?:\.\d+)?", root.read("proc/uptime"))
    return KernelLog(True, xids=tuple(read_xids(answer.text, float(uptime[0]) if uptime else None)))


def read_xids(text: str, uptime_seconds: float | None = None) -> list[Xid]:
    """Return every XID and SXID of a log, oldest first."""
    xids: list[Xid] = []
    for line in text.splitlines():
        if _LOADED.search(line):
            xids = [replace(xid, before_reload=True) for xid in xids]
        match = _SXID.search(line) or _XID.search(line)
        if match is None:
            continue
        written = _SINCE_BOOT.match(line)
        age = max(0.0, uptime_seconds - float(written[1])) if written and uptime_seconds is not None else None
        is_switch = match.re is _SXID
        xids.append(Xid(_bus(match[1]), int(match[2]), match[3].strip(), is_switch, age))
    return xids


def driver_was_loaded(line: str) -> bool:
    """Return whether a log line reports that the driver was loaded again: earlier requested actions are then done."""
    return _LOADED.search(line) is not None


def _bus(text: str) -> str:
    return text.lower().partition(".")[0]
