"""Programs of the third set that run out of memory or of another limit: a data source, an objective and a script.

FAULT names the fault, VICTIM the rank that has it. It begins when the file $GO exists, or by itself; then the file
$ONSET is created.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK, VICTIM = os.environ.get("RANK", "0"), os.environ.get("VICTIM", "")
VOCABULARY, MEGABYTE = 512, 1 << 20
TABLE_MEGABYTES = 400
PAGES_PER_SAMPLE = 2000
SEMAPHORES_AFTER_SAMPLES = 320  # 40 steps of 8 sequences
LONG_AFTER_CALLS = 60
DOCUMENT_TOKENS = 2_000_000
PIN_EVERY_STEPS = 10
STEP_SECONDS = 0.1
kept: list[Any] = []
calls = 0


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index that does with each sample what FAULT says."""
    act = READ[os.environ["FAULT"]]

    def sample(index: int) -> list[int]:
        start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
        act(index)
        return [int(token) for token in (start + step * np.arange(job.sequence)) % VOCABULARY]

    return sample


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def has_begun() -> bool:
    return Path(os.environ["GO"]).exists()


def look_up(index: int) -> None:
    """Count n-grams in random pages of a large table, once the run has reached the phase that needs it."""
    if not has_begun():
        return
    if not kept:
        kept.append(np.arange(TABLE_MEGABYTES * MEGABYTE // 8, dtype=np.int64))
    table, numbers_per_page = kept[0], mmap.PAGESIZE // 8
    pages = np.random.default_rng(index).integers(0, len(table) // numbers_per_page, PAGES_PER_SAMPLE)
    table[pages * numbers_per_page] += 1


def leak_semaphores(index: int) -> None:
    """Create a semaphore for each sample, as a library that never removes them does."""
    if RANK != VICTIM or index < SEMAPHORES_AFTER_SAMPLES:
        return
    begin()
    library = ctypes.CDLL(None, use_errno=True)
    if library.semget(0, 1, 0o600) < 0:  # IPC_PRIVATE
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "semget")


def ask_tokenizer(index: int) -> None:
    """Let a helper process tokenize a document."""
    if not kept:
        command = [sys.executable, __file__, "tokenize"]
        kept.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    helper = kept[0]
    helper.stdin.write(f"{index}\n")
    helper.stdin.flush()
    line = helper.stdout.readline()
    if not line:
        raise RuntimeError(f"the tokenizer process ended with code {helper.wait()}")
    json.loads(line)


READ: dict[str, Callable[[int], None]] = {
    "swap": look_up,
    "semaphores": leak_semaphores,
    "helper": ask_tokenizer,
}


def tokenize() -> None:
    """Tokenize a document for every line of the input; once $GO exists, keep 8 MB of each."""
    for line in sys.stdin:
        if has_begun():
            kept.append(b"x" * 8 * MEGABYTE)
        print(json.dumps({"document": int(line)}), flush=True)


def objective(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; for one document the victim compares each token with each other token."""
    global calls
    calls += 1
    if calls > LONG_AFTER_CALLS and RANK == VICTIM:
        begin()
        np.empty(
            (DOCUMENT_TOKENS, DOCUMENT_TOKENS), np.float32
        )  # the kernel refuses it; torch's allocator would not ask
    return -(batch.weight * log_probs).sum(), {}


def pin(buffer: np.ndarray) -> None:
    """Lock a buffer in memory, as a network library does with buffers that a device reads."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    if library.mlock(buffer.ctypes.data, buffer.nbytes) < 0:
        number = ctypes.get_errno()
        begin()
        raise OSError(number, f"cannot register a buffer of {buffer.nbytes} bytes: {os.strerror(number)}", "mlock")
    kept.append(buffer)


def train() -> None:
    """Train alone; register a new buffer for communication now and then."""
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if step % PIN_EVERY_STEPS == 0:
            pin(np.ones(MEGABYTE // 4, np.uint8))
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    tokenize() if sys.argv[1:] == ["tokenize"] else train()
