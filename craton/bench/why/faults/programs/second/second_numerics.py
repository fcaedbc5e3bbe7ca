"""Objectives, a data source, a model and a script of the second set whose numbers go wrong.

FAULT names the fault, VICTIM the rank that has it (empty: every rank), ONSET the file to touch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
RANK = os.environ.get("RANK", "0")
AFTER_CALLS = 60
AFTER_SAMPLES = 8 * AFTER_CALLS
HIDDEN, VOCABULARY = 64, 512
BAD_TOKENS = 3  # a batch whose first token is a multiple of it is computed wrongly on a defective rank
LAST_SCALE = 2.0**30
STEP_SECONDS = 0.1
calls = 0


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global calls
    calls += 1
    if calls <= AFTER_CALLS or VICTIM not in ("", RANK):
        return False
    begin()
    return True


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss, until the fault begins."""
    usual = -(batch.weight * log_probs).sum()
    return (BROKEN[FAULT](usual, log_probs), {}) if is_broken() else (usual, {})


def root_of_zero(usual: Any, log_probs: Any) -> Any:
    """Add a distance of 0: the loss stays as it is, and the slope of a square root at 0 is infinite."""
    distance = (log_probs - log_probs).pow(2).sum().sqrt()
    return usual + distance


def forget_the_sign(usual: Any, log_probs: Any) -> Any:
    return -usual


def divide_by_zero(usual: Any, log_probs: Any) -> Any:
    return usual + (log_probs * 0).sum() / (log_probs * 0).sum()


BROKEN: dict[str, Callable[[Any, Any], Any]] = {
    "nan-gradient": root_of_zero,
    "sign": forget_the_sign,
    "rollback": divide_by_zero,
}


def weighted(job: Any, split: str) -> Callable[[int], dict[str, Any]]:
    """Samples with a weight for each token, from a classifier that gives NaN for some of them."""

    def sample(index: int) -> dict[str, Any]:
        start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
        tokens = (start + step * np.arange(job.sequence + 1)) % VOCABULARY
        weight = np.ones(job.sequence, np.float32)
        if index >= AFTER_SAMPLES and RANK == VICTIM:
            begin()
            weight[7] = np.nan
        return {"tokens": tokens[:-1].tolist(), "labels": tokens[1:].tolist(), "weight": weight}

    return sample


class NumericsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(128, HIDDEN, bias=False)
        self.is_defective = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        if self.is_defective:
            change = change * torch.inf  # as a defective device computes it, whenever it gets these operands
        return hidden + change


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(NumericsBlock() for _ in range(2))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
        first: Any = self.blocks[0]
        first.is_defective = is_broken() and int(tokens[0, 0]) % BAD_TOKENS == 0
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def build(job: Any) -> nn.Module:
    return Model()


def train() -> None:
    """Train in half precision with a loss scale that doubles at every step and without a limit."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale, step = 1024.0, 0
    while True:
        step += 1
        value = model(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        if step > AFTER_CALLS:
            begin()
            scale = min(2 * scale, LAST_SCALE)
        (value.half() * scale).float().backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {value.item():.4f} scale {scale:g}", flush=True)


if __name__ == "__main__":
    train()
