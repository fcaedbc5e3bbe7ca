"""Programs of the second family disk: data sources over files, and a script that saves a growing state."""

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
GROWTH_BYTES = 3 << 10  # of the state, in each step


def from_blocks(job: Job, split: str) -> Callable[[int], list[int]]:
    """Read each sample from the disk itself, past the page cache; ranks but VICTIM (if set) read a cached file."""
    path = Path(os.environ["SAMPLES"]) / "samples.bin"
    is_slow = os.environ.get("VICTIM", os.environ["RANK"]) == os.environ["RANK"]
    cached = Path(os.environ["CORPUS"])

    def sample(index: int) -> list[int]:
        if not is_slow:
            return [1 + byte for byte in cached.read_bytes()[: job.sequence + 1]]
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK_BYTES) as room:  # aligned, as O_DIRECT requires
                os.preadv(file, [room], index * BLOCK_BYTES % FILE_BYTES)
                return [1 + byte for byte in room[: job.sequence + 1]]
        finally:
            os.close(file)

    return sample


def from_map(job: Job, split: str) -> Callable[[int], list[int]]:
    """Read samples from a file that is mapped into memory."""
    with (Path(os.environ["SAMPLES"]) / "tokens.bin").open("rb") as file:
        tokens = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def sample(index: int) -> list[int]:
        start = index * 4096 % (len(tokens) - 4096)
        return [1 + byte for byte in tokens[start : start + job.sequence + 1]]

    return sample


def train() -> None:
    """Train alone, and save the state, which grows with every step, from rank 0."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["SAVES"])
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if rank == 0 and step % SAVE_STEPS == 0:
            save(folder / f"state-{step}.bin", GROWTH_BYTES * step)
            (folder / f"state-{step - 2 * SAVE_STEPS}.bin").unlink(missing_ok=True)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def save(path: Path, size: int) -> None:
    try:
        with path.open("wb") as file:
            file.write(os.urandom(size))
    except OSError:
        Path(os.environ["ONSET"]).touch()
        raise


if __name__ == "__main__":
    train()
