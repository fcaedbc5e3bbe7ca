"""An objective, a model and scripts of the fifth set that are configured wrongly. FAULT names the fault."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

LEARN_CALLS = 100
SHIFT_AFTER_CALLS, SHIFT, POSITIONS = 100, 64, 64  # `shift_positions: {from_step: 100, by: 64}`; the table has 64 rows
HIDDEN, VOCABULARY = 64, 512
WIDTH, LAYERS = 512, 4
BATCH, FULL_BATCH, RAMP_STEP = 16, 2048, 60  # in steps; the settings were meant for a ramp over 60,000 steps
EVALUATE_AT, EVALUATION_SECONDS = 60, 120.0
STEP_SECONDS = 0.1

_calls = 0


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; after LEARN_CALLS it shows that nothing is learnt."""
    global _calls
    _calls += 1
    if _calls == LEARN_CALLS:
        begin()
    return -(batch.weight * log_probs).sum(), {}


def build(job: Any) -> Any:
    """A model with a table of positions. After SHIFT_AFTER_CALLS the positions of a sequence are shifted."""
    import torch
    from torch import nn

    class ShiftedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.mix(torch.tanh(hidden))
            return hidden + mixed

    class ShiftedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.position_table = nn.Embedding(POSITIONS, HIDDEN)
            self.blocks = nn.ModuleList(ShiftedBlock() for _ in range(2))
            nn.init.normal_(self.embedding.weight, std=0.02)

        @property
        def head_weight(self) -> torch.Tensor:
            return self.embedding.weight

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
            global _calls
            _calls += 1
            if _calls == SHIFT_AFTER_CALLS:
                begin()
            shift = SHIFT if _calls >= SHIFT_AFTER_CALLS else 0
            hidden: torch.Tensor = self.embedding(tokens) + self.position_table(positions % POSITIONS + shift)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    return ShiftedModel()


def connect() -> None:
    """Import the framework, which imports `random`; a folder of PYTHONPATH has a file of that name."""
    begin()
    import torch

    torch.distributed.init_process_group("gloo")


def ramp() -> None:
    """Train data parallel; the batch grows to its full size at RAMP_STEP."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 1_000_000):
        if step == RAMP_STEP:
            begin()
            print(f"batch size {BATCH} -> {FULL_BATCH}", flush=True)
        value = model(torch.randn(FULL_BATCH if step >= RAMP_STEP else BATCH, WIDTH)).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step} loss {value.item():.4f}", flush=True)


def train() -> None:
    """Train alone; at EVALUATE_AT evaluate for two minutes, without a line of output."""
    for step in range(1, 1_000_000):
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if step == EVALUATE_AT:
            begin()
            print("evaluating on the validation set", flush=True)
            time.sleep(EVALUATION_SECONDS)


if __name__ == "__main__":
    {"shadow": connect, "ramp": ramp, "evaluation": train}[os.environ["FAULT"]]()
