"""A custom model: `model: custom_model:build` in examples/custom-model.yaml.

`build(job)` returns a module with `blocks` (the units of activation checkpointing, compilation and sharding),
`head_weight` [vocabulary, hidden], and a forward from tokens to hidden states. Craton does the rest: data, parallelism,
checkpoints.
"""

import torch
from torch import nn
from torch.nn.functional import relu

from craton.job import Job
from craton.ml.kernels import Documents, attention

HIDDEN, HEADS, LAYERS, VOCABULARY = 128, 4, 3, 1024  # the vocabulary size of data.tokenizer


class ParallelBlock(nn.Module):
    """A block with parallel attention and MLP; the MLP uses squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = self.qkv(normed).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = attention(query, key, value, documents).flatten(2)
        return x + self.output(attended) + self.down(relu(self.up(normed)).square())


class Model(nn.Module):
    """Learned positions, parallel blocks, and a head tied to the embedding."""

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.place = nn.Embedding(sequence, HIDDEN)
        self.blocks = nn.ModuleList(ParallelBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        for table in (self.embedding, self.place):
            nn.init.normal_(table.weight, std=0.02)

    @property
    def head_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x = self.embedding(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x, documents)
        return self.norm(x)


def build(job: Job) -> nn.Module:
    return Model(job.sequence)
