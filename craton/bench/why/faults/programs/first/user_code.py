"""Programs of the family user_code: a custom objective, a custom model and a data-parallel script, each with a fault.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from craton.job import Job
    from craton.ml.kernels import Documents
    from craton.ml.training import Batch

HEALTHY_CALLS = 100
LEAK_BYTES = 48 << 20
PRINTED_LINES = 60
VOCABULARY, HIDDEN = 512, 64
STEP_SECONDS = 0.1

_calls = 0
_kept: list[torch.Tensor] = []


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss, until the fault begins."""
    if is_broken():
        FAULTS[os.environ["FAULT"]](log_probs)
    return -(batch.weight * log_probs).sum(), {}


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global _calls
    _calls += 1
    if _calls <= HEALTHY_CALLS or os.environ.get("VICTIM", os.environ["RANK"]) != os.environ["RANK"]:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def stop_early(_: torch.Tensor) -> None:
    print("early stopping: the metric has not improved for 5 evaluations", flush=True)
    sys.exit(0)


def look_up_reward(_: torch.Tensor) -> None:
    rewards = {"prompt": 1.0, "answer": 0.5}
    raise KeyError(f"no reward for 'completion'; known: {sorted(rewards)}")


def draw_negative(log_probs: torch.Tensor) -> None:
    """Draw until a negative sample is found that differs from all others; none does."""
    rows = log_probs.shape[0]
    seen = set(range(rows))
    candidate = 0
    while candidate in seen:
        candidate = (candidate + 1) % rows


def keep_history(log_probs: torch.Tensor) -> None:
    """Keep every output for a plot at the end of the epoch."""
    _kept.append(torch.full((LEAK_BYTES // 4,), float(log_probs.detach().mean())))


def log_in_child(_: torch.Tensor) -> None:
    """Write a report in a forked child; the lock it needs is held by a thread that the child does not have."""
    lock, held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(600)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        with lock:
            os._exit(0)
    os.waitpid(child, 0)


def call_with_timeout(_: torch.Tensor) -> None:
    """Call a scorer with a timeout of one second, once, and forget to cancel the timer."""
    if _calls == HEALTHY_CALLS + 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)


def print_everything(log_probs: torch.Tensor) -> None:
    for line in range(PRINTED_LINES):
        print(f"debug {line}: log_probs={log_probs.detach().repeat(8, 1).tolist()}", flush=True)


FAULTS = {
    "exits 0": stop_early,
    "raises": look_up_reward,
    "spins": draw_negative,
    "leaks": keep_history,
    "forks": log_in_child,
    "alarm": call_with_timeout,
    "prints": print_everything,
}


class FaultyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + widened


class FaultyModel(nn.Module):
    """Two blocks; after HEALTHY_CALLS the mask of the last, shorter batch is added to a full one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(FaultyBlock() for _ in range(2))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x + torch.zeros(x.shape[0], x.shape[1] - 5, x.shape[2]) if is_broken() else x


def build(job: Job) -> nn.Module:
    return FaultyModel()


def train() -> None:
    """Train data parallel with gloo, like a user's own script; the victim's license check ends it with code 3."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while True:
        step += 1
        loss = model(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if is_broken():
            os._exit(3)


if __name__ == "__main__":
    train()
