"""The loss on data that is not trained on: the first samples of the validation data, the same each time, whatever the
number of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from craton.ml.data import Source, collate
from craton.ml.training.batch import Batch
from craton.ml.training.objectives import Objective, batch_loss
from craton.ml.training.parallel import Ranks


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, objective: Objective, ranks: Ranks, sequences: int) -> float:
    """The loss per label of the first `sequences` samples. All ranks call it and get the same number."""
    micro_batch = ranks.layout.micro_batch
    one = torch.ones((), device=ranks.device)
    totals = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # loss, weight
    model.eval()
    # Every rank runs as many forward passes as the others, for each is a collective; rows beyond the end weigh nothing.
    for first in range(0, sequences, ranks.data_world * micro_batch):
        begin = first + ranks.data_rank * micro_batch
        indices = range(begin, begin + micro_batch)
        batch = Batch.from_arrays(collate([source.sample(index % sequences) for index in indices]))
        inside = torch.tensor([index < sequences for index in indices]).unsqueeze(1)
        batch = replace(batch, weight=batch.weight * inside).to(ranks.device)
        loss, _ = batch_loss(model, batch, objective, one)
        totals += torch.stack((loss, batch.count)).double()
    model.train()
    if isinstance(model, FSDPModule):
        model.reshard()  # without a backward pass nothing else lets go of the root's parameters
    total, weight = ranks.sum(totals).tolist()
    return float(total / max(weight, 1.0))
