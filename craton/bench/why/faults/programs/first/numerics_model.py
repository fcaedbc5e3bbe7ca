"""A model whose activations double at every step until they overflow: `model: numerics_model:build`."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

HIDDEN, VOCABULARY, AFTER_CALLS = 64, 512, 40


class GrowingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(128, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + change


class GrowingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(GrowingBlock() for _ in range(2))
        self.calls = 0

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        self.calls += 1
        if self.calls > AFTER_CALLS:
            Path(os.environ["ONSET"]).touch()
            hidden = hidden * 64.0 ** (self.calls - AFTER_CALLS)  # a residual stream that no norm holds back
        return hidden


def build(job: Any) -> nn.Module:
    return GrowingModel()
