"""Programs of the fourth set that run out of memory or of another limit: an objective and scripts.

FAULT names the fault, VICTIM the rank that has it. It begins when the file $GO exists, or by itself; then the file
$ONSET is created.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

RANK, VICTIM = os.environ.get("RANK", "0"), os.environ.get("VICTIM", "")
MEGABYTE = 1 << 20
STATE_MEGABYTES = 2048
HELPER = f"import time\nkept = b'x' * (80 * {MEGABYTE})\ntime.sleep(3600)"
HELPER_EVERY_CALLS = 4
MAP_AFTER_CALLS = 80
MAPPED_BYTES = 512 * MEGABYTE
WATCH_EVERY_STEPS = 5
STEP_SECONDS = 0.1
kept: list[Any] = []
calls = 0


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def has_begun() -> bool:
    return Path(os.environ["GO"]).exists()


def objective(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; FAULT says what each call does with memory."""
    global calls
    calls += 1
    fault = os.environ["FAULT"]
    if fault == "helpers" and RANK == VICTIM and has_begun() and calls % HELPER_EVERY_CALLS == 0:
        kept.append(subprocess.Popen([sys.executable, "-c", HELPER]))  # another pool of workers; the old ones stay
    elif fault == "mapping" and calls > MAP_AFTER_CALLS:
        begin()
        fill_new_pages()
    return -(batch.weight * log_probs).sum(), {}


def fill_new_pages() -> None:
    """Map a buffer, touch each of its pages, and give it back, as an allocator without a cache does."""
    with mmap.mmap(-1, MAPPED_BYTES) as room:
        for page in range(0, MAPPED_BYTES, mmap.PAGESIZE):
            room[page] = 1


def gather_state() -> None:
    """Gather the shards of all ranks in the memory of this one, for one file with the full state."""
    print("saving: gathering the full state on rank 0", flush=True)
    for _ in range(STATE_MEGABYTES // 16):
        kept.append(np.ones(16 * MEGABYTE, np.uint8))
        time.sleep(0.01)


def share_samples() -> None:
    """Create the segment in which rank 0 shares its samples with the others."""
    name = Path("segment.txt").read_text()
    if RANK == "0":
        begin()
        kept.append(shared_memory.SharedMemory(name, create=True, size=MEGABYTE))
    time.sleep(1)


def watch_settings() -> None:
    """Watch the folder of the settings for changes, with a watcher that is never stopped."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.inotify_init1(0) < 0:
        begin()
        raise OSError(ctypes.get_errno(), "inotify instance limit reached")


def train() -> None:
    """Train alone, step by step."""
    fault, step = os.environ["FAULT"], 0
    if fault == "segment":
        share_samples()
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if fault == "gathers" and RANK == VICTIM and has_begun():
            gather_state()
        elif fault == "watches" and step % WATCH_EVERY_STEPS == 0:
            watch_settings()
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train()
