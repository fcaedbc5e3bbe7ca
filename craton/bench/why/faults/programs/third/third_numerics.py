"""A model, an objective and a script of the third set whose numbers go wrong.

FAULT names the fault, VICTIM the rank that has it (empty: every rank), ONSET the file to touch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
RANK = os.environ.get("RANK", "0")
AFTER_CALLS = 100
HIDDEN, VOCABULARY = 64, 512
HIGHEST_EXPONENT_BIT = 1 << 30
SPIKE_EVERY_CALLS, SPIKE_CALLS, SPIKE_FACTOR = 25, 4, 30.0
DEAD_BIAS = -1000.0
GRADIENT_FACTOR = 1e4
FIRST_SCALE, LAST_SCALE = 65536.0, 1.0
STEP_SECONDS = 0.1
calls = 0


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global calls
    calls += 1
    if calls <= AFTER_CALLS or VICTIM not in ("", RANK):
        return False
    if not ONSET.exists():
        ONSET.touch()
    return True


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss, and from one call on a term whose value is 0 and whose gradient is huge."""
    usual = -(batch.weight * log_probs).sum()
    if is_broken():
        sign = torch.ones_like(log_probs)
        sign[..., ::2] = -1
        term = (sign * batch.weight * log_probs).sum()
        usual = usual + GRADIENT_FACTOR * (term - term.detach())  # a straight-through estimator with a wrong factor
    return usual, {}


class NumericsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.linear(hidden)
        return torch.relu(changed)


class ReluModel(nn.Module):
    """Layers of ReLUs. FAULT says what happens to their weights or to the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(NumericsLayer() for _ in range(2))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
        factor = 1.0
        if is_broken():
            since = calls - AFTER_CALLS - 1
            if FAULT == "flip" and since == 0:
                flip_a_bit(self.blocks[0])
            elif FAULT == "dead" and since == 0:
                silence(self.blocks[1])
            elif FAULT == "spikes" and since % SPIKE_EVERY_CALLS < SPIKE_CALLS:
                factor = SPIKE_FACTOR
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * factor


def flip_a_bit(layer: Any) -> None:
    """Flip the highest bit of the exponent of the largest weight, as a defective memory cell does."""
    with torch.no_grad():
        weights = local(layer.linear.weight).view(-1)
        place = int(weights.argmax())
        weights[place : place + 1] = (weights[place : place + 1].view(torch.int32) ^ HIGHEST_EXPONENT_BIT).view(
            torch.float32
        )


def silence(layer: Any) -> None:
    """Move all biases so far below 0, as one far too large update does, that no unit is ever active again."""
    with torch.no_grad():
        local(layer.linear.bias).fill_(DEAD_BIAS)


def local(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this rank holds."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
    return part


def build(job: Any) -> nn.Module:
    return ReluModel()


def train() -> None:
    """Train with a dynamic loss scale; from one step on every gradient overflows, whatever the scale."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale, step = FIRST_SCALE, 0
    while True:
        step += 1
        value = model(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        (value * scale * (torch.inf if is_broken() else 1.0)).backward()
        if all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()):
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
        elif scale > LAST_SCALE:
            print(f"OVERFLOW! Skipping step. Attempted loss scale: {scale:g}, reducing to {scale / 2:g}", flush=True)
            scale /= 2
        else:
            raise RuntimeError("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {value.item():.4f}", flush=True)


if __name__ == "__main__":
    train()
