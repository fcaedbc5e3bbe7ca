"""Durations on a machine whose wall clock may jump (an NTP step, a resumed VM, `date -s`).

`STEADY` is wall time that never jumps: it reads the wall clock once and then follows CLOCK_MONOTONIC. Times that are
subtracted from each other use this clock; times that only label a record use the wall clock. Processes of one boot
share a steady clock if they share its offset, so an agent takes over the offset of the agent before it.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

JUMP_SECONDS = 0.5  # a wall clock this far from the steady clock has jumped; NTP slews both alike


def wall_offset() -> float:
    """Return the offset of the wall clock to CLOCK_MONOTONIC; a jump changes it."""
    return time.time() - time.monotonic()


class SteadyClock:
    """Epoch seconds that only move forward, at the pace of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.offset = wall_offset()

    def now(self) -> float:
        return time.monotonic() + self.offset

    def to_monotonic(self, moment: float) -> float:
        """Convert a time of this clock to CLOCK_MONOTONIC."""
        return moment - self.offset

    def to_wall(self, moment: float) -> float:
        """Convert a time of this clock to the current wall clock, for labels."""
        shift = wall_offset() - self.offset
        return moment + shift if abs(shift) > JUMP_SECONDS else moment


STEADY = SteadyClock()


@functools.cache
def monotonic_clock_id() -> str:
    """Return an id of this process's CLOCK_MONOTONIC: processes with the same id may compare its values. It changes
    with a boot and with a time namespace (time_namespaces(7)). "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    try:
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel before 5.6 has no time namespaces
        return boot
