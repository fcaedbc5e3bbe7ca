"""Programs of the family cpu: a model that gives its matmuls far more threads than there are cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from craton.job import Job
    from craton.ml.kernels import Documents

HEALTHY_CALLS = 100
THREADS = 48
VOCABULARY, HIDDEN = 512, 256


class BusyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + widened


class BusyModel(nn.Module):
    """Two blocks; after HEALTHY_CALLS forward passes it sets the number of threads as for a large server."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(BusyBlock() for _ in range(2))
        self.calls = 0

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        self.calls += 1
        if self.calls == HEALTHY_CALLS:
            torch.set_num_threads(THREADS)
            Path(os.environ["ONSET"]).touch()
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def build(job: Job) -> nn.Module:
    return BusyModel()
