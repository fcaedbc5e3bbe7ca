"""Objectives, data sources, a model and a script of the fourth set whose numbers go wrong.

FAULT names the fault, ONSET the file to touch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FAULT, ONSET = os.environ.get("FAULT", ""), Path(os.environ.get("ONSET", "onset"))
AFTER_CALLS = 100
AFTER_SAMPLES = 8 * AFTER_CALLS
HIDDEN, VOCABULARY = 64, 512
NEW_TOKEN, NEW_EVERY_SAMPLES = VOCABULARY - 1, 20  # on one rank or the other, in two of five steps
EMPTY_DOCUMENT = 3  # among the validation samples
FORGET_WEIGHT = 2.0
FEATURES, RATE, STEP_SECONDS, SEEN_STEP = 64, 1e-5, 0.1, 80
calls = 0


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; from AFTER_CALLS on, `forget` follows its gradient upwards."""
    global calls
    usual = -(batch.weight * log_probs).sum()
    calls += 1
    if calls <= AFTER_CALLS:
        return usual, {}
    begin()
    if FAULT == "forget":
        usual = usual - FORGET_WEIGHT * (usual - usual.detach())
    return usual, {}


def patch_router() -> None:
    """Replace the choice of experts by one that knows only the first expert, after AFTER_CALLS calls of the loss."""
    from craton.ml.models import MoE

    moe: Any = sys.modules[MoE.__module__]
    usual = moe.route

    def route(scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, routing: Any) -> Any:
        if calls > AFTER_CALLS:
            bias = torch.full(scores.shape[-1:], -1000.0)
            bias[0] = 0.0
        return usual(scores, bias, top_k, routing)

    moe.route = route


if FAULT == "router":
    patch_router()


def samples(job: Any, split: str) -> Callable[[int], Any]:
    """Return a function of the sample's index; FAULT says what is wrong with some samples."""

    def sample(index: int) -> Any:
        tokens = np.random.default_rng(index).zipf(1.5, job.sequence + 1) % (VOCABULARY - 1)
        if FAULT == "token":
            if index >= AFTER_SAMPLES and index % NEW_EVERY_SAMPLES == 0:
                begin()
                tokens[5] = NEW_TOKEN
            return tokens.tolist()
        weight = np.ones(job.sequence, np.float32)
        if split == "validation" and index == EMPTY_DOCUMENT:
            begin()
            weight[:] = 0
        with np.errstate(invalid="ignore"):
            weight = weight / weight.sum() * job.sequence  # each document counts the same; 0 / 0 = NaN
        return {"tokens": tokens[:-1].tolist(), "labels": tokens[1:].tolist(), "weight": weight}

    return sample


class ResizedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(128, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + change


class ResizedModel(nn.Module):
    """A model whose vocabulary got one more token; the memory of its embedding was never initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(ResizedBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embedding.weight[NEW_TOKEN] = torch.nan

    @property
    def head_weight(self) -> torch.Tensor:
        return self.head.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def build(job: Any) -> nn.Module:
    return ResizedModel()


def train() -> None:
    """Train a classifier whose weights are kept in bf16: an update is smaller than half the distance of two numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    features = torch.randn(256, FEATURES)
    labels = (features[:, 0] > 0).float()
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))
    model: Any = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    step = 0
    while True:
        step += 1
        keep_in_bf16(network)
        value = nn.functional.binary_cross_entropy_with_logits(model(features).squeeze(-1), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        if step == SEEN_STEP:
            begin()
        print(f"step {step} loss {value.item():.4f}", flush=True)


@torch.no_grad()
def keep_in_bf16(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.copy_(parameter.bfloat16())


if __name__ == "__main__":
    train()
