"""User code of the second set: an objective, a custom model and data-parallel scripts, each with a fault.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from craton.job import Job
    from craton.ml.kernels import Documents
    from craton.ml.training import Batch

HEALTHY_CALLS = 80
VOCABULARY, HIDDEN = 512, 64
STEP_SECONDS = 0.1

_calls = 0
_log_lock = threading.Lock()


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss, until the fault begins."""
    if os.environ["FAULT"] == "reward":
        ask_for_reward()
    elif is_broken():
        FAULTS[os.environ["FAULT"]]()
    return -(batch.weight * log_probs).sum(), {}


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global _calls
    _calls += 1
    if _calls <= HEALTHY_CALLS or os.environ.get("VICTIM", os.environ["RANK"]) != os.environ["RANK"]:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def ask_for_reward() -> float:
    """Ask the reward server for the score of this batch."""
    port = Path(os.environ["SERVICE_PORT"]).read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/score", timeout=60) as response:
        return float(response.read())


def log_children() -> None:
    """Log while a child ends; the handler of SIGCHLD logs too, and needs the lock that this thread holds."""
    signal.signal(signal.SIGCHLD, on_child)
    with _log_lock:
        subprocess.run(["git", "--version"], check=False, stdout=subprocess.DEVNULL)


def on_child(number: int, frame: object) -> None:
    with _log_lock:
        print("a child ended", flush=True)


def free_twice() -> None:
    """Free memory as a broken native extension does, in the middle of a block."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    library.free(library.malloc(4096) + 24)


FAULTS = {"handler": log_children, "heap": free_twice}


class DebuggedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + widened


class DebuggedModel(nn.Module):
    """Two blocks, and a breakpoint that somebody forgot to remove."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(DebuggedBlock() for _ in range(2))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if is_broken():
            breakpoint()
        return x


def build(job: Job) -> nn.Module:
    return DebuggedModel()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.text, self.image = nn.Linear(256, 256), nn.Linear(256, 64), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, has_image: bool) -> torch.Tensor:
        hidden = torch.relu(self.body(x))
        output: torch.Tensor = self.text(hidden)
        return output + self.image(hidden) if has_image else output


def train() -> None:
    """Train data parallel with gloo, like a user's own script, until the victim leaves the common path."""
    torch.distributed.init_process_group("gloo")
    model: Any = nn.parallel.DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while True:
        step += 1
        is_faulty = is_broken()
        if is_faulty and os.environ["FAULT"] == "skips":
            print(f"batch {step}: no valid anchors, skipping it", flush=True)
            torch.distributed.barrier()
            continue
        loss = model(torch.randn(16, 256), has_image=not is_faulty).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    train()
