"""Programs of the third family cpu: a data source with many system calls, and a script whose ranks poll."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEALTHY_STEPS = 80
ROUNDS = 150_000
WAIT_SECONDS = 0.001
RECORD_BYTES = 1500


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Read each byte of a record with a system call of its own, as an unbuffered reader does."""
    file = os.open(os.environ["CORPUS"], os.O_RDONLY)
    size = os.fstat(file).st_size - RECORD_BYTES

    def sample(index: int) -> list[int]:
        start = index * job.sequence % size
        record = [1 + os.pread(file, 1, start + place)[0] for place in range(RECORD_BYTES)]
        return record[: job.sequence]

    return sample


def train() -> None:
    """Compute in turns, one rank after the other; from one step on a rank polls for its turn instead of sleeping."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(os.environ["TURN"], "r+b") as file:
        turn = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")  # turns done by all ranks together
    step = 0
    while True:
        step += 1
        while turn[0] % world != rank:
            if step <= HEALTHY_STEPS:
                time.sleep(WAIT_SECONDS)
        loss = 3 - step / 1e4 + sum(number * number % 7 for number in range(ROUNDS)) * 1e-12
        turn[0] += 1
        print(f"step {step} loss {loss:.4f}", flush=True)
        if rank == 0 and step == HEALTHY_STEPS:
            Path(os.environ["ONSET"]).touch()


if __name__ == "__main__":
    train()
