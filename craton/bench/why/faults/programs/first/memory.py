"""Data sources that run out of memory: `data.source: memory:samples`. FAULT names the fault."""

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
AFTER_SAMPLES = 160  # 20 steps of 8 sequences
VOCABULARY, MEGABYTE = 512, 1 << 20
kept: list[Any] = []


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index; from AFTER_SAMPLES on the rank VICTIM runs out of memory."""

    def sample(index: int) -> list[int]:
        start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
        if index >= AFTER_SAMPLES and VICTIM in ("", os.environ.get("RANK", "0")):
            if not ONSET.exists():
                ONSET.touch()
            BROKEN[FAULT]()
        return [int(token) for token in (start + step * np.arange(job.sequence)) % VOCABULARY]

    return sample


def leak() -> None:
    """Keep 64 MB more with every sample, as a cache without a limit does."""
    kept.append(np.ones(64 * MEGABYTE, np.uint8))


def fill_most_of_the_limit() -> None:
    """Take memory until 93% of the container's limit are used, and keep it."""
    group = Path("/sys/fs/cgroup/memory" + _group("memory"))
    limit = int((group / "memory.limit_in_bytes").read_text())
    while int((group / "memory.usage_in_bytes").read_text()) < 0.93 * limit:
        kept.append(np.ones(8 * MEGABYTE, np.uint8))


def exceed_address_space() -> None:
    """Allocate more than `ulimit -v` allows."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MEGABYTE, used + 64 * MEGABYTE))
    kept.append(np.ones(1024 * MEGABYTE, np.uint8))


def map_shared_memory() -> None:
    """Write a batch into a shared memory segment, as workers of a data loader do: SIGBUS if /dev/shm is full."""
    path = f"/dev/shm/batch-{os.getpid()}-{len(kept)}"
    with open(path, "w+b") as file:
        file.truncate(64 * MEGABYTE)
        segment = mmap.mmap(file.fileno(), 64 * MEGABYTE)
    for offset in range(0, 64 * MEGABYTE, mmap.PAGESIZE):
        segment[offset] = 1
    kept.append(segment)


def write_shared_memory() -> None:
    """Write a file to /dev/shm: ENOSPC where it is too small."""
    with open(f"/dev/shm/queue-{os.getpid()}", "ab") as file:
        file.write(bytes(64 * MEGABYTE))


def start_threads() -> None:
    """Start threads without end, as a pool for each request does."""
    while True:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def _group(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise LookupError(f"no cgroup of {controller}")


BROKEN: dict[str, Callable[[], None]] = {
    "leak": leak,
    "fill": fill_most_of_the_limit,
    "address-space": exceed_address_space,
    "map-shared-memory": map_shared_memory,
    "write-shared-memory": write_shared_memory,
    "threads": start_threads,
    "none": lambda: None,
}
