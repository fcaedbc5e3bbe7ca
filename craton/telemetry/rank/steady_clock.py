"""Durations on a machine whose wall clock may jump (an NTP step, a resumed VM, `date -s`).

`STEADY` is wall time that never jumps: it reads the wall clock once and then counts by CLOCK_MONOTONIC. What is
subtracted from something else is of this clock; what only labels a record is of the wall clock. Processes of one boot
agree on a steady clock when they share its offset, so an agent takes over that of the agent before it.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

JUMP_SECONDS = 0.5  # a wall clock that is this far from the steady one has jumped; NTP slews both alike


def wall_offset() -> float:
    """What the wall clock is ahead of CLOCK_MONOTONIC; a jump changes it."""
    return time.time() - time.monotonic()


class SteadyClock:
    """Epoch seconds that only move forward, at the pace of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.offset = wall_offset()

    def now(self) -> float:
        return time.monotonic() + self.offset

    def to_monotonic(self, moment: float) -> float:
        """A moment of this clock on CLOCK_MONOTONIC."""
        return moment - self.offset

    def to_wall(self, moment: float) -> float:
        """The label of a moment of this clock, by what the wall clock says now."""
        shift = wall_offset() - self.offset
        return moment + shift if abs(shift) > JUMP_SECONDS else moment


STEADY = SteadyClock()


@functools.cache
def monotonic_clock_id() -> str:
    """Names the CLOCK_MONOTONIC of this process: two processes with the same id may compare its values. It changes with
    a boot and with a time namespace (time_namespaces(7)). Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    try:
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel before 5.6 has no time namespaces
        return boot
