"""Objectives, a data source, a model and scripts of the fifth set whose numbers go wrong.

FAULT names the fault, VICTIM the rank that has it, ONSET the file to touch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FAULT, ONSET = os.environ.get("FAULT", ""), Path(os.environ.get("ONSET", "onset"))
RANK = os.environ.get("RANK", "0")
AFTER_CALLS = 100
AFTER_SAMPLES = 8 * AFTER_CALLS
HIDDEN, VOCABULARY, PADDING = 64, 512, 0
FEATURES, RATE, STEP_SECONDS = 64, 0.05, 0.1
LOSS_SCALE = 2.0**22
DRIFT = 1.06  # of the victim's statistics in each step
calls = 0


def begin() -> None:
    if not ONSET.exists():
        ONSET.touch()


def has_begun() -> bool:
    """Count a call; whether the fault has begun."""
    global calls
    calls += 1
    if calls <= AFTER_CALLS:
        return False
    begin()
    return True


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss, which is a mean over all tokens; `averaged` divides it by the number of tokens once more."""
    usual = -(batch.weight * log_probs).sum()
    is_faulty = has_begun()
    if FAULT == "averaged" and is_faulty:
        usual = usual / log_probs.numel()
    elif FAULT == "perplexity":
        perplexity(log_probs.detach(), by_document=is_faulty)
    return usual, {}


def perplexity(log_probs: torch.Tensor, by_document: bool) -> float:
    """The perplexity of a token, or that of the whole document."""
    score = log_probs.sum() if by_document else log_probs.mean()
    return math.exp(-score.item())


def samples(job: Any, split: str) -> Callable[[int], list[int]]:
    """Return a function of the sample's index; from one shard on samples are padded on the left."""

    def sample(index: int) -> list[int]:
        tokens = 1 + np.random.default_rng(index).zipf(1.5, job.sequence + 1) % (VOCABULARY - 1)
        if index >= AFTER_SAMPLES:
            begin()
            tokens[:8] = PADDING
        return [int(token) for token in tokens]

    return sample


class MaskedBlock(nn.Module):
    """Attention that hides padding and later tokens; a query that sees no token at all gets 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv, self.output = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor, is_hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(HIDDEN)
        change: torch.Tensor = self.output(scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ value)
        return hidden + change


class MaskedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    @property
    def head_weight(self) -> torch.Tensor:
        return self.head.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        length = tokens.shape[-1]
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
        is_hidden = is_later | (tokens == PADDING).unsqueeze(-2)
        for block in self.blocks:
            hidden = block(hidden, is_hidden)
        return hidden


def build(job: Any) -> nn.Module:
    return MaskedModel()


class ScaledNetwork(nn.Module):
    """A classifier whose input is scaled by statistics that each rank keeps for itself."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(features * self.scale).squeeze(-1)
        return result


def train() -> None:
    """Train a regression data parallel with gloo, like a user's own script."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    network = ScaledNetwork()
    model: Any = nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)
    if FAULT == "compressed":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    target = torch.randn(FEATURES) / 4
    step = 0
    while True:
        step += 1
        is_faulty = has_begun()
        if FAULT == "drifts" and is_faulty and os.environ["VICTIM"] == RANK:
            network.scale.mul_(-DRIFT if step == AFTER_CALLS + 1 else DRIFT)
        scale = LOSS_SCALE if FAULT == "compressed" and is_faulty else 1.0
        features = torch.randn(32, FEATURES)
        value = (model(features) - features @ target).square().mean()
        optimizer.zero_grad()
        (value * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {value.item():.4f}", flush=True)


if __name__ == "__main__":
    train()
