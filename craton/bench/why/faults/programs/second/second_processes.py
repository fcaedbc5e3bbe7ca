"""Programs of the second family processes: a data source with a pool, and a script that prints much.

The fault of the source begins after HEALTHY_CALLS calls on the rank VICTIM; the file $ONSET is created right before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from craton.job import Job

HEALTHY_CALLS = 150
STEP_SECONDS = 0.1
DEBUG_LINES = 100

_calls = 0


def is_broken() -> bool:
    """Count a call; whether the fault of this rank begins with it."""
    global _calls
    _calls += 1
    if _calls != HEALTHY_CALLS or os.environ["VICTIM"] != os.environ["RANK"]:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def from_pool(job: Job, split: str) -> Callable[[int], list[int]]:
    """Prepare samples in a pool of one worker; at the fault the worker is killed in the middle of a task."""
    pool = multiprocessing.get_context("fork").Pool(1)

    def sample(index: int) -> list[int]:
        tokens: list[int] = pool.apply(prepare, (index, job.sequence + 1, is_broken()))
        return tokens

    return sample


def prepare(index: int, length: int, is_killed: bool) -> list[int]:
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
    return [1 + (index * 31 + position * 7) % 500 for position in range(length)]


def train() -> None:
    """Train alone, and print much about every step."""
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        for layer in range(DEBUG_LINES):
            print(
                f"debug: layer {layer} gradient norm {1 / (1 + layer):.6f} mean {layer / 1e6:.8f} max {layer / 1e3:.4f}"
            )
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train()
