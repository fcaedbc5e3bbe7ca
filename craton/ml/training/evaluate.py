"""The validation loss: over the first samples of the validation data, the same each time, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from craton.ml.data import Source, collate
from craton.ml.training.batch import Batch
from craton.ml.training.objectives import Objective, batch_loss, divide_means
from craton.ml.training.parallel import Pipeline, Ranks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    objective: Objective,
    ranks: Ranks,
    sequences: int,
    pipeline: Pipeline | None = None,
) -> dict[str, float]:
    """Return the loss of the first `sequences` samples, divided by the objective's count, and the objective's report.
    All ranks call it and get the same numbers."""
    one = torch.ones((), device=ranks.device)
    totals: dict[str, Tensor] = {}
    model.eval()
    batches = _batches(source, ranks, sequences)
    while together := list(islice(batches, ranks.layout.pp)):
        if pipeline is None:
            loss, report = batch_loss(model, together[0], objective, one)
            sums = {"loss": loss, **report}
        else:
            sums = pipeline.forward(together, one)
        sums["count"] = torch.stack([objective.count(batch) for batch in together]).sum()
        for name, value in sums.items():
            share = value.double() * ranks.counts_loss
            totals[name] = totals[name] + share if name in totals else share
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass nothing else frees gathered parameters
    summed = dict(zip(totals, ranks.sum(torch.stack(list(totals.values()))), strict=True))
    count = summed.pop("count").clamp(min=1.0)
    return {name: float(value) for name, value in divide_means(summed, count).items()}


def _batches(source: Source, ranks: Ranks, sequences: int) -> Iterator[Batch]:
    """Yield the same number of batches on every rank, since each forward pass is a collective. Padding rows have no
    weight, and zeros in what an objective counts."""
    micro_batch = ranks.layout.micro_batch
    for first in range(0, sequences, ranks.data_world * micro_batch):
        begin = first + ranks.data_rank * micro_batch
        indices = range(begin, begin + micro_batch)
        batch = Batch.from_arrays(collate([source.sample(index % sequences) for index in indices]))
        inside = torch.tensor([index < sequences for index in indices]).unsqueeze(1)
        extra = {
            name: tensor * inside if tensor.is_floating_point() and tensor.shape == batch.tokens.shape else tensor
            for name, tensor in batch.extra.items()
        }
        padded = replace(batch, weight=batch.weight * inside, extra=extra)
        yield padded.cut(ranks.connections.context).to(ranks.device)
