"""The validation loss: over the first samples of the validation data, the same each time, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from craton.ml.data import Source, collate
from craton.ml.training.batch import Batch
from craton.ml.training.objectives import Objective, batch_loss
from craton.ml.training.parallel import Pipeline, Ranks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    objective: Objective,
    ranks: Ranks,
    sequences: int,
    pipeline: Pipeline | None = None,
) -> float:
    """Return the loss per label of the first `sequences` samples. All ranks call it and get the same number."""
    one = torch.ones((), device=ranks.device)
    totals = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # loss, weight
    model.eval()
    batches = _batches(source, ranks, sequences)
    while together := list(islice(batches, ranks.layout.pp)):
        if pipeline is None:
            loss, _ = batch_loss(model, together[0], objective, one)
        else:
            loss = pipeline.forward(together, one)
        count = torch.stack([batch.count for batch in together]).sum()
        totals += torch.stack((loss, count)).double() * ranks.counts_loss
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass nothing else frees gathered parameters
    total, weight = ranks.sum(totals).tolist()
    return float(total / max(weight, 1.0))


def _batches(source: Source, ranks: Ranks, sequences: int) -> Iterator[Batch]:
    """Yield the same number of batches on every rank, since each forward pass is a collective; padding rows have no
    weight."""
    micro_batch = ranks.layout.micro_batch
    for first in range(0, sequences, ranks.data_world * micro_batch):
        begin = first + ranks.data_rank * micro_batch
        indices = range(begin, begin + micro_batch)
        batch = Batch.from_arrays(collate([source.sample(index % sequences) for index in indices]))
        inside = torch.tensor([index < sequences for index in indices]).unsqueeze(1)
        yield replace(batch, weight=batch.weight * inside).cut(ranks.connections.context).to(ranks.device)
