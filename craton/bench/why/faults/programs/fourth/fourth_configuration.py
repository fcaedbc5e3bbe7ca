"""Objectives, a model and scripts of the fourth set that are configured wrongly. FAULT names the fault."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

RANK = os.environ.get("RANK", "0")
SEEN_CALLS = 60
DEBUG_AFTER_CALLS = 100  # `debug: {detect_anomaly: true, from_step: 100}`, left from the search for a NaN
HIDDEN, GATES, VOCABULARY = 64, 40, 512
SAMPLE_AT, STEP_SECONDS = 60, 0.1
SAMPLE = "Das Modell schreibt: „Übermäßig große Äpfel“"

_calls = 0


def begin() -> None:
    Path(os.environ["ONSET"]).touch()


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; the fault shows after SEEN_CALLS, or in the first evaluation, which needs no gradient."""
    global _calls
    _calls += 1
    is_seen = _calls == SEEN_CALLS if os.environ["FAULT"] == "spikes" else not log_probs.requires_grad
    if is_seen:
        begin()
    return -(batch.weight * log_probs).sum(), {}


def build(job: Any) -> Any:
    """A model of many small operations. After DEBUG_AFTER_CALLS the debug mode of autograd is on."""
    import torch
    from torch import nn

    class GatedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.gates = nn.Parameter(torch.ones(GATES, HIDDEN))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for gate in range(GATES):
                hidden = hidden + 0.01 * torch.tanh(hidden * self.gates[gate])
            mixed: torch.Tensor = self.mix(hidden)
            return hidden + mixed

    class GatedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(GatedBlock() for _ in range(2))
            nn.init.normal_(self.embedding.weight, std=0.02)

        @property
        def head_weight(self) -> torch.Tensor:
            return self.embedding.weight

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
            global _calls
            _calls += 1
            if _calls == DEBUG_AFTER_CALLS:
                begin()
                torch.autograd.set_detect_anomaly(True)
            hidden: torch.Tensor = self.embedding(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    return GatedModel()


def connect() -> None:
    """Start the process group with the backend of the GPU cluster that the script was written for."""
    import torch

    begin()
    torch.distributed.init_process_group("nccl")


def train() -> None:
    """Train alone; rank 0 shows a generated sample now and then."""
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if RANK == "0" and step % SAMPLE_AT == 0:
            begin()
            print(SAMPLE, flush=True)


if __name__ == "__main__":
    connect() if os.environ["FAULT"] == "backend" else train()
