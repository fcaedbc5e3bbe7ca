"""Programs of the fifth family cpu: an objective, a data source and a script that use the CPUs badly.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; then the
file $ONSET is created.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

RANK = os.environ.get("RANK", "0")
HEALTHY_CALLS, HEALTHY_SAMPLES = 80, 640
VOCABULARY = 512
MATRIX = 192
SAMPLING_SECONDS = 0.0002
WATCHED_VALUES, BINS = 2_000_000, 2048
INDEX_BYTES = 48 << 20
STEP_SECONDS, BOUND_STEP, CORES_PER_RANK = 0.1, 40, 32

stacks: list[str] = []
_calls = 0


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def is_victim() -> bool:
    return os.environ.get("VICTIM", RANK) == RANK


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss; FAULT says what else each call does."""
    global _calls
    _calls += 1
    fault, is_first = os.environ["FAULT"], _calls == HEALTHY_CALLS
    if is_victim() and _calls >= HEALTHY_CALLS:
        if is_first:
            begin()
        if fault == "samples" and is_first:
            start_sampling()
        elif fault == "histograms":
            write_histograms()
    if fault == "half":
        similarity(is_half=_calls >= HEALTHY_CALLS)
    return -(batch.weight * log_probs).sum(), {}


def similarity(is_half: bool) -> float:
    """Compare the batch with a small memory of embeddings, in single or in half precision."""
    import torch

    keys = torch.ones(MATRIX, MATRIX, dtype=torch.float16 if is_half else torch.float32)
    return float((keys @ keys).sum())


def start_sampling() -> None:
    """Start a profiler that records the stacks of all threads by a timer, much too often."""
    signal.signal(signal.SIGALRM, lambda *_: record())
    signal.setitimer(signal.ITIMER_REAL, SAMPLING_SECONDS)


def record() -> None:
    stacks[:] = [line for frame in sys._current_frames().values() for line in traceback.format_stack(frame)]
    signal.setitimer(signal.ITIMER_REAL, SAMPLING_SECONDS)


def write_histograms() -> None:
    """Sort the values of the watched layers into bins, for a dashboard."""
    values = np.random.default_rng(_calls).normal(size=WATCHED_VALUES)
    np.histogram(values, np.sort(np.random.default_rng(0).normal(size=BINS)))


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index; from one step on the victim hashes its whole index for each sample."""
    content = bytes(INDEX_BYTES)

    def sample(index: int) -> list[int]:
        if index >= HEALTHY_SAMPLES and is_victim():
            begin()
            hashlib.sha512(content).hexdigest()  # the key of the cache of transformed samples
        return [int(token) for token in np.random.default_rng(index).zipf(1.5, job.sequence + 1) % VOCABULARY]

    return sample


def train() -> None:
    """Train alone, step by step; after the warm-up each rank binds itself to its share of 64 cores."""
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        if step == BOUND_STEP and is_victim():
            begin()
            first = CORES_PER_RANK * int(RANK)
            os.sched_setaffinity(0, range(first, first + CORES_PER_RANK))
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train()
