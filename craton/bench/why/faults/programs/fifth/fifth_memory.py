"""Programs of the fifth set that misuse memory: an objective and scripts.

FAULT names the fault, VICTIM the rank that has it. It begins when the file $GO exists, or by itself; then the file
$ONSET is created.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

RANK, VICTIM = os.environ.get("RANK", "0"), os.environ.get("VICTIM", "")
MEGABYTE = 1 << 20
HEALTHY_CALLS = 80
STACK_BYTES, NESTING = 128 << 10, 950  # the stack of a thread in images with musl
CACHE_BYTES = 2 << 30
SCORERS = 4
TABLE_MEGABYTES = 4096
HUGE_PAGES = 0x40000  # MAP_HUGETLB (asm-generic/mman-common.h)
BUFFER_BYTES = 64 * MEGABYTE
STEP_SECONDS = 0.1
# A library whose variables of threads must lie in the block that the loader reserves at the start of a process.
LIBRARY = """\
static __thread char room[65536] __attribute__((tls_model("initial-exec")));
char *fused_room(void) { return room; }
"""
kept: list[Any] = []
calls = 0


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def objective(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; FAULT says what each call does with memory."""
    global calls
    calls += 1
    fault = os.environ["FAULT"]
    if RANK == VICTIM:
        if fault == "table" and not kept and Path(os.environ["GO"]).exists():
            load_table()
        elif fault == "stack" and calls > HEALTHY_CALLS:
            parse_in_thread()
        elif fault == "forks":
            score_in_children()
    return -(batch.weight * log_probs).sum(), {}


def load_table() -> None:
    """Load a table of phrases, of more memory than the container has."""
    print("loading the table of phrases", flush=True)
    for _ in range(TABLE_MEGABYTES // 16):
        kept.append(np.ones(16 * MEGABYTE, np.uint8))
        time.sleep(0.01)


def parse_in_thread() -> None:
    """Parse a nested answer in a thread with a small stack."""
    begin()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=json.loads, args=("[" * NESTING + "]" * NESTING,))
    thread.start()
    thread.join()


def score_in_children() -> None:
    """Fork a scorer for each sample; from one step on a large cache is in memory, whose page tables are copied."""
    if calls == HEALTHY_CALLS:
        cache = mmap.mmap(-1, CACHE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        cache.madvise(mmap.MADV_NOHUGEPAGE)
        np.frombuffer(cache, np.uint8)[:: mmap.PAGESIZE] = 1
        kept.append(cache)
        begin()
    for _ in range(SCORERS):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)


def map_huge_pages() -> None:
    """Reserve the buffers of the transfers in huge pages, of which the node has none."""
    print("mapping 64 MiB of huge pages for the transfers", flush=True)
    time.sleep(1)
    begin()
    kept.append(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGE_PAGES))


def load_library() -> None:
    """Compile a fused operation and load it after all other libraries."""
    library = Path(f"libfused_rank{RANK}.so").absolute()
    library.with_suffix(".c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, library.with_suffix(".c")], check=True)
    begin()
    ctypes.CDLL(str(library))


def train() -> None:
    """Train alone, step by step."""
    fault, step = os.environ["FAULT"], 0
    if fault == "pages":
        map_huge_pages()
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if fault == "library" and step == HEALTHY_CALLS // 2:
            load_library()
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train()
