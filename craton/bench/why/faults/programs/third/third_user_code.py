"""User code of the third set: an objective and a data-parallel script, each with a fault.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from craton.ml.training import Batch

HEALTHY_CALLS = 80
CACHED_OBJECTS = 4_000_000
SCORES_BYTES = 1 << 20
STEP_SECONDS = 0.1
RANK = os.environ["RANK"]

_calls = 0
_cache: list[list[int]] = []
_seen: list[torch.Tensor] = []


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss, until the fault begins."""
    fault = os.environ["FAULT"]
    if is_broken():
        if fault == "detached":
            return -(batch.weight * log_probs.detach()).sum(), {}
        FAULTS[fault](log_probs)
    return -(batch.weight * log_probs).sum(), {}


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global _calls
    _calls += 1
    if _calls <= HEALTHY_CALLS or os.environ.get("VICTIM", RANK) != RANK:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def score_in_child(_: torch.Tensor) -> None:
    """Wait for a scorer before its output is read; it waits until somebody reads its full pipe."""
    scorer = subprocess.Popen([sys.executable, "-c", f"print('x' * {SCORES_BYTES})"], stdout=subprocess.PIPE)
    scorer.wait()


def collect_garbage(_: torch.Tensor) -> None:
    """Collect garbage in every step, with a cache of millions of objects that each collection visits."""
    if not _cache:
        _cache.extend([number] for number in range(CACHED_OBJECTS))
    gc.collect()


def compare_with_all(log_probs: torch.Tensor) -> None:
    """Compare all batches seen so far with each other, for a score of diversity: quadratic in the number of steps."""
    _seen.append(log_probs.detach().mean(dim=0))
    sum(float((one - other).abs().mean()) for one in _seen for other in _seen)


FAULTS = {"scorer": score_in_child, "garbage": collect_garbage, "history": compare_with_all}


def decode(requests: queue.Queue[int]) -> None:
    """Decode samples ahead, for as long as the process lives."""
    while True:
        time.sleep(1e-6 * requests.get())


def train() -> None:
    """Train for HEALTHY_CALLS steps; the victim decodes in a thread that nothing tells to end."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    requests: queue.Queue[int] = queue.Queue()
    if os.environ["VICTIM"] == RANK:
        threading.Thread(target=decode, args=(requests,), name="decoder").start()
    for step in range(1, HEALTHY_CALLS + 1):
        requests.put(step)
        loss = model(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    torch.distributed.destroy_process_group()
    print("training finished", flush=True)
    Path(os.environ["ONSET"]).touch()


if __name__ == "__main__":
    train()
