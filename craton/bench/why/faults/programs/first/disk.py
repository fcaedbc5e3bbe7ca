"""Programs of the family disk: data sources that read a file for every sample, and a script that saves often."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.job import Job

BLOCK_BYTES = 128 << 10
FILE_BYTES = 8 << 20
STEP_SECONDS = 0.1
SAVE_STEPS = 3
STATE_BYTES = 64 << 10


def from_blocks(job: Job, split: str) -> Callable[[int], list[int]]:
    """Read each sample from the disk itself, past the page cache, as a dataset larger than memory is read."""
    path = Path(os.environ["SAMPLES"]) / "samples.bin"

    def sample(index: int) -> list[int]:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK_BYTES) as room:  # aligned, as O_DIRECT requires
                os.preadv(file, [room], index * BLOCK_BYTES % FILE_BYTES)
                return [1 + byte for byte in room[: job.sequence + 1]]
        finally:
            os.close(file)

    return sample


def from_files(job: Job, split: str) -> Callable[[int], list[int]]:
    """Read each sample from a file of its own."""
    folder = Path(os.environ["SAMPLES"])

    def sample(index: int) -> list[int]:
        text = (folder / f"{index % 4}.txt").read_bytes()
        return [1 + byte for byte in text[: job.sequence + 1]]

    return sample


def train() -> None:
    """Train alone, and save the state every few steps from rank 0."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["SAVES"])
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if rank == 0 and step % SAVE_STEPS == 0:
            with (folder / f"state-{step % 4}.bin").open("wb") as file:
                file.write(os.urandom(STATE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train()
