"""Programs of the fourth family cpu: an objective with two faults, and bursts of busy processes beside a run.

FAULT `scratch` allocates new scratch memory in every call, `anomalies` leaves a debugging mode of autograd on; both
begin after HEALTHY_CALLS calls on the rank VICTIM (empty: every rank). `fourth_cpu.py bursts COUNT` is the neighbour.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

HEALTHY_CALLS = 150
SCRATCH_BYTES = 320 << 20
BUSY_SECONDS, PERIOD_SECONDS = 3.0, 5.0

_calls = 0


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss; the fault begins after HEALTHY_CALLS."""
    global _calls
    _calls += 1
    if os.environ.get("VICTIM", os.environ["RANK"]) == os.environ["RANK"] and _calls >= HEALTHY_CALLS:
        if _calls == HEALTHY_CALLS:
            Path(os.environ["ONSET"]).touch()
        fill_scratch() if os.environ["FAULT"] == "scratch" else detect_anomalies()
    return -(batch.weight * log_probs).sum(), {}


def fill_scratch() -> None:
    """Fill new memory, which the kernel provides page by page, and give it back."""
    import torch

    with mmap.mmap(-1, SCRATCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        scratch = torch.frombuffer(memory, dtype=torch.uint8)
        scratch[:: mmap.PAGESIZE].fill_(1)
        del scratch


def detect_anomalies() -> None:
    """Record the stack of every operation, and look for NaN in every gradient."""
    import torch

    torch.autograd.set_detect_anomaly(True)


def bursts(count: int) -> None:
    """Start processes that are busy at the same time, for a part of every period, as jobs of cron are."""
    for _ in range(count - 1):
        subprocess.Popen([sys.executable, __file__, "bursts", "1"])
    while True:
        if time.monotonic() % PERIOD_SECONDS >= BUSY_SECONDS:
            time.sleep(PERIOD_SECONDS - time.monotonic() % PERIOD_SECONDS)


if __name__ == "__main__":
    bursts(int(sys.argv[2]))
