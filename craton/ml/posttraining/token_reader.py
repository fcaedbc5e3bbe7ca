"""What a model says about given sequences, per token: log-probabilities of the labels, or scores of its scalar head.

The sequences are packed and shared among the data-parallel ranks like those of an update, so every layout of the model
works: the last pipeline stage reads, context-parallel ranks read their pieces, and one sum over all ranks brings the
values of all sequences to every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from craton.ml.kernels import ContextSlice
from craton.ml.posttraining.rows import RowPlan, TrainedSequence, micro_batches, num_slots, unpacked
from craton.ml.training import Batch, Objective, Readings
from craton.ml.training.parallel import Pipeline, Ranks

TokenValues = Literal["log_probs", "scores"]


class TokenReader:
    """Reads from one model. All ranks call `read` together, with the same sequences."""

    def __init__(
        self, model: nn.Module, ranks: Ranks, capacity: int, what: TokenValues = "log_probs", temperature: float = 1.0
    ) -> None:
        """`capacity`: places of a row."""
        self._model, self._ranks, self._capacity, self._what = model, ranks, capacity, what
        self._read: dict[int, Tensor] = {}  # by id of the batch
        self._objective = Objective(f"read {what}", self._note, reads=what, temperature=temperature)
        self._pipeline = Pipeline(model, ranks, self._objective) if ranks.pipeline else None

    @torch.no_grad()
    def read(self, sequences: Sequence[TrainedSequence], packs: bool = True) -> list[NDArray[np.float32]]:
        """Return the values at the labels of each sequence, [places]."""
        ranks, layout = self._ranks, self._ranks.layout
        lengths = [sequence.places for sequence in sequences]
        plan = RowPlan.of(lengths, self._capacity, layout, packs)
        slots = num_slots(len(sequences), self._capacity)
        loaded = micro_batches(plan, sequences, (), ranks.data_rank, layout, self._capacity, slots)
        batches = [Batch.from_arrays(arrays).cut(ranks.connections.context).to(ranks.device) for arrays in loaded]
        was_training = self._model.training
        self._model.eval()
        try:
            self._pass(batches)
        finally:
            self._model.train(was_training)
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # without a backward pass nothing else frees gathered parameters
        whole = torch.zeros(len(plan.rows), self._capacity, device=ranks.device)
        columns = self._columns()
        rows = plan.shares[ranks.data_rank]
        for number, batch in enumerate(batches):
            if not ranks.counts_loss:
                break
            values = self._read[id(batch)].float()
            for place, row in enumerate(rows[number * layout.micro_batch : (number + 1) * layout.micro_batch]):
                if row >= 0:
                    whole[row, columns] = values[place]
        self._read.clear()
        return unpacked(plan, lengths, ranks.sum(whole).cpu().numpy())

    def _pass(self, batches: Sequence[Batch]) -> None:
        one = torch.ones((), device=self._ranks.device)
        if self._pipeline is not None:
            size = self._ranks.layout.pp
            for begin in range(0, len(batches), size):
                self._pipeline.forward(batches[begin : begin + size], one)
            return
        for batch in batches:
            hidden = self._model(batch.tokens, batch.positions, batch.documents)
            read = Readings.of(self._model, hidden, batch, self._objective)
            self._note(*read.arguments(batch))

    def _note(self, values: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self._read[id(batch)] = values.detach()
        return values.sum() * 0.0, {}

    def _columns(self) -> Tensor:
        """Return the places of a row that this rank has."""
        context = self._ranks.connections.context
        places = torch.arange(self._capacity, device=self._ranks.device)
        return places if context is None else ContextSlice(context.rank, context.size).cut(places[None])[0]
