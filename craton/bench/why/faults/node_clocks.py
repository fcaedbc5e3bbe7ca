"""Wall clocks of nodes that can be changed while a run goes on.

The machine's clock stays as it is: a preloaded library (`clock.c`) gives the processes of a node another wall clock.
"""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from craton.bench.why.faults.running import RunningJob

SHIM = Path(__file__).parent / "clock.c"
ENTRY = "=ddd"  # offset, rate, since: as in clock.c
HOUR = 3600.0
CLOCK = (r"\bclocks?\b", r"\bNTP\b", r"\bchrony", r"time synchroni[sz]ation", r"\btime (skew|jump|differ)")
NEEDS = ("gcc",)


def with_clocks(*numbers: int, offset: float = 0.0) -> Callable[[RunningJob], None]:
    """Give every process of the run a clock that can be changed; those of the given nodes start with an offset."""

    def prepare(job: RunningJob) -> None:
        page = _page(job)
        page.write_bytes(bytes(4096))
        library = page.with_suffix(".so")
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM)]
        subprocess.run(command, check=True, capture_output=True)
        job.environment.update(LD_PRELOAD=str(library), CLOCK_FILE=str(page))
        for number in numbers:
            _set_clock(job, number, offset)

    return prepare


def jump(*numbers: int, seconds: float) -> Callable[[RunningJob], None]:
    """Move the clocks of these nodes by so many seconds."""

    def inject(job: RunningJob) -> None:
        for number in numbers:
            _set_clock(job, number, seconds)

    return inject


def drift(number: int, rate: float) -> Callable[[RunningJob], None]:
    """Let a node's clock run faster by this rate."""
    return lambda job: _set_clock(job, number, 0.0, rate)


def _set_clock(job: RunningJob, number: int, offset: float, rate: float = 0.0) -> None:
    with _page(job).open("r+b") as page:
        page.seek(number * struct.calcsize(ENTRY))
        page.write(struct.pack(ENTRY, offset, rate, time.time()))


def _page(job: RunningJob) -> Path:
    return job.folder.parent / "clocks"
