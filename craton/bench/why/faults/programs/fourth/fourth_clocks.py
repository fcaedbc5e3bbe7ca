"""Programs of the fourth family clocks: objectives, a data source and scripts that reckon with the wall clock.

FAULT of the script: `pace` begins a step every second, `fresh` lets rank 1 wait for weights that are newer than
its question. FAULT of the objective: `numbers` gives every batch a number that contains the time, `timings` takes the
time of every token.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.job import Job
    from craton.ml.training import Batch

STEP_SECONDS, PACE_SECONDS = 0.2, 1.0
SAMPLES_PER_SECOND, BURST = 100.0, 20.0  # of the service with the samples
POLL_SECONDS = 0.005
TIMINGS = 3000
TOLERATED_SECONDS = 60.0
RANK = int(os.environ.get("RANK", "0"))

_last = 0
_timings: list[float] = []


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss, with a number or with timings for the records of the team."""
    next_number() if os.environ["FAULT"] == "numbers" else take_timings()
    return -(batch.weight * log_probs).sum(), {}


def next_number() -> int:
    """A number that no other worker has: milliseconds, then the worker. It must grow."""
    global _last
    now = time.time_ns() // 1_000_000
    if now < _last:
        raise RuntimeError(f"clock moved backwards: refusing to make a number for {_last - now} milliseconds")
    _last = now
    return now << 10 | RANK


def take_timings() -> None:
    """Take the time at every token."""
    _timings[:] = [time.perf_counter() for _ in range(TIMINGS)]


def from_service(job: Job, split: str) -> Callable[[int], list[int]]:
    """Ask a service for each sample, at most SAMPLES_PER_SECOND by a token bucket."""
    tokens, updated = BURST, time.time()

    def sample(index: int) -> list[int]:
        nonlocal tokens, updated
        while True:
            now = time.time()
            tokens, updated = min(BURST, tokens + (now - updated) * SAMPLES_PER_SECOND), now
            if tokens >= 1:
                break
            time.sleep(POLL_SECONDS)
        tokens -= 1
        draw = random.Random(index)
        return [1 + int(500 * draw.random() ** 3) for _ in range(job.sequence + 1)]

    return sample


def pace() -> None:
    """Begin a step every PACE_SECONDS: work, then sleep until the next one."""
    following = time.time()
    for step in range(1, 1_000_000):
        time.sleep(PACE_SECONDS / 10)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        following += PACE_SECONDS
        time.sleep(following - time.time())


def fresh() -> None:
    """Average gradients over gloo; rank 0 publishes weights in every step, rank 1 loads them."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    gradients, weights = torch.randn(1000), Path("weights.bin")
    for step in range(1, 1_000_000):
        if RANK == 0:
            weights.write_bytes(bytes(1000))
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        if RANK == 1:
            load_fresh(weights)
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def load_fresh(path: Path) -> bytes:
    """Load a file once it is newer than this question."""
    asked = time.time()
    while path.stat().st_mtime < asked - TOLERATED_SECONDS:
        time.sleep(POLL_SECONDS)
    return path.read_bytes()


if __name__ == "__main__":
    {"pace": pace, "fresh": fresh}[os.environ["FAULT"]]()
