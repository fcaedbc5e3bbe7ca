"""Programs of the fifth family clocks: an objective, a data source and scripts that reckon with the wall clock.

FAULT of the objective: `evaluations` (one every few seconds, missed ones are caught up) or `records` (each with a time
of 32 bits). FAULT of the script: `rounds` (rank 0 says when the next one begins) or `folders` (named by the hour).
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.job import Job
    from craton.ml.training import Batch

STEP_SECONDS = 0.1
EVALUATE_EVERY_SECONDS, EVALUATION_SECONDS = 5.0, 0.25
SAMPLES_A_REPORT = 64
ROUND_STEPS, ROUND_SECONDS = 10, 0.3
RANK = int(os.environ.get("RANK", "0"))

_next_evaluation = time.time() + EVALUATE_EVERY_SECONDS
_records = bytearray()


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss, with evaluations or records of the team."""
    evaluate_if_due() if os.environ["FAULT"] == "evaluations" else note_record()
    return -(batch.weight * log_probs).sum(), {}


def evaluate_if_due() -> None:
    """Ask the evaluation service at every due time, also at those that were missed."""
    global _next_evaluation
    while time.time() >= _next_evaluation:
        time.sleep(EVALUATION_SECONDS)
        _next_evaluation += EVALUATE_EVERY_SECONDS


def note_record() -> None:
    """Note when this batch was seen: seconds since 1970 in 32 bits, as the format has it."""
    _records[:] = struct.pack("<i", int(time.time()))


def from_service(job: Job, split: str) -> Callable[[int], list[int]]:
    """Make samples, and report now and then how many a second there are."""
    count, since = 0, time.time()

    def sample(index: int) -> list[int]:
        nonlocal count, since
        count += 1
        if count % SAMPLES_A_REPORT == 0:
            elapsed_milliseconds = int((time.time() - since) * 1000)
            print(f"{1000 * SAMPLES_A_REPORT // elapsed_milliseconds} samples/s", flush=True)
            since = time.time()
        draw = random.Random(index)
        return [1 + int(500 * draw.random() ** 3) for _ in range(job.sequence + 1)]

    return sample


def train(do: Callable[[int], None]) -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    gradients = torch.randn(1000)
    for step in range(1, 1_000_000):
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if step % ROUND_STEPS == 0:
            do(step)


def begin_round(step: int) -> None:
    """Begin a round of collecting samples on all ranks at the same moment, which rank 0 chooses."""
    import torch

    moment = torch.tensor([time.time() + ROUND_SECONDS], dtype=torch.float64)
    torch.distributed.broadcast(moment, src=0)
    time.sleep(max(0.0, moment.item() - time.time()))


def exchange(step: int) -> None:
    """Let rank 0 write samples into the folder of the hour, where all others read them."""
    import torch

    folder = Path(time.strftime("samples-%Y%m%d-%H"))
    if RANK == 0:
        folder.mkdir(exist_ok=True)
        (folder / f"{step}.bin").write_bytes(bytes(1000))
    torch.distributed.barrier()
    if RANK != 0:
        (folder / f"{step}.bin").read_bytes()


if __name__ == "__main__":
    train({"rounds": begin_round, "folders": exchange}[os.environ["FAULT"]])
