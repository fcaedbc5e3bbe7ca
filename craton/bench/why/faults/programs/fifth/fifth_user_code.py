"""User code of the fifth set: an objective, a data source and scripts, each with a fault.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

RANK = os.environ["RANK"]
HEALTHY_CALLS, HEALTHY_SAMPLES = 80, 640
VOCABULARY = 512
FEATURES, RATE, STEP_SECONDS = 32, 0.05, 0.1
LONGEST_PHRASE = 16

_calls = 0


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global _calls
    _calls += 1
    if _calls <= HEALTHY_CALLS or os.environ.get("VICTIM", RANK) != RANK:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss; from one step on with a metric of repeated phrases."""
    if is_broken():
        count_confident_phrases(log_probs)
    return -(batch.weight * log_probs).sum(), {}


def count_confident_phrases(log_probs: torch.Tensor) -> int:
    """Count the phrases whose tokens are likely on average, token by token."""
    found = 0
    for row in log_probs.detach():
        for start in range(len(row)):
            for end in range(start + 1, min(start + LONGEST_PHRASE, len(row))):
                found += sum(row[place].item() for place in range(start, end)) > start - end
    return found


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index that replaces a broken sample by the next one."""

    def sample(index: int) -> list[int]:
        if is_cut_off(index):
            return sample(index + 1)
        return [int(token) for token in np.random.default_rng(index).zipf(1.5, job.sequence + 1) % VOCABULARY]

    return sample


def is_cut_off(index: int) -> bool:
    """Whether the line of a sample could not be extracted; from one page on no line of the victim could."""
    if index < HEALTHY_SAMPLES or os.environ.get("VICTIM", RANK) != RANK:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def length_of(text: str) -> int:
    return len(text)


def tokenize() -> None:
    """Tokenize with two worker processes, which import this script from its beginning."""
    print("tokenizing with 2 workers", flush=True)
    time.sleep(1)
    Path(os.environ["ONSET"]).touch()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        print(sum(workers.map(length_of, ["a sentence", "another sentence"])), flush=True)


def exchange(hidden: torch.Tensor, is_first: bool) -> None:
    """Exchange hidden states with the other rank. One of them must send first and the other one receive first."""
    import torch

    other = 1 - int(RANK)
    for operation in (torch.distributed.send, torch.distributed.recv)[:: 1 if is_first else -1]:
        operation(hidden, other)


def train() -> None:
    """Train a regression data parallel with gloo, like a user's own script."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    target = torch.randn(FEATURES)
    step = 0
    while True:
        step += 1
        is_faulty, fault = is_broken(), os.environ["FAULT"]
        if fault == "exchange":
            exchange(torch.ones(FEATURES), is_first=RANK == "0" or is_faulty)
        features = torch.randn(16, FEATURES)
        loss = (model(features).squeeze(-1) - features @ target - torch.randn(16) / 2).square().mean()
        if not (fault == "accumulates" and is_faulty):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ in ("__main__", "__mp_main__"):  # as in a script without a guard, its workers run it too
    tokenize() if os.environ["FAULT"] == "guard" else train()
