"""Draft tokens from a draft model, beside the model that verifies them.

The draft model has a KV cache of its own over the same block numbers, and shares block tables, seeds and temperatures.
It samples with the same noise as the model it drafts for. So a draft token is accepted whenever both would sample the
same token, and an equal model has every draft token accepted. All tokens of a draft are made without a host round trip:
one pass over the last tokens of every request, then one decode step per further token, as CUDA graphs where captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from craton.ml.collectives import Peers
from craton.ml.models import Decoder
from craton.ml.serving.device.attention_backends import PagedPast
from craton.ml.serving.device.graphs import DecodeGraphs
from craton.ml.serving.device.sampler import Chosen, PromptLogprobs
from craton.ml.serving.schedule import LAST_TOKENS, DraftInput, Integers, Move, StepInput


class DraftRunner(Protocol):
    """The runner interface that a draft model needs."""

    model: Decoder
    past: PagedPast
    device: torch.device
    graphs: DecodeGraphs | None
    vocabulary: int

    def compute(self, work: StepInput) -> tuple[Chosen, PromptLogprobs]: ...

    def set_next_tokens(self, rows: Integers, tokens: Tensor) -> None: ...

    def move(self, moves: Sequence[Move]) -> None: ...

    def capture(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Drafter:
    """Runs a draft model. With tensor parallelism every rank has a whole one, and all use the tokens of rank 0."""

    def __init__(self, runner: DraftRunner, peers: Peers | None = None) -> None:
        self.runner = runner
        self._peers = peers

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks as in the other KV cache."""
        self.runner.move(moves)

    def draft(self, work: DraftInput) -> Tensor:
        """Let late requests catch up, and return draft tokens [requests, length] of the others."""
        first = self._first(work)
        if not work.requests:
            return torch.empty(0, 0, dtype=torch.int64, device=self.runner.device)
        drafts = [first]
        rows, ends = work.rows[: work.requests], work.ends[: work.requests]
        every, nothing = np.arange(work.requests, dtype=np.int32), np.zeros(0, np.int32)
        for added in range(1, work.length):
            step = StepInput(rows, np.ones_like(rows), ends + added, work.requests, nothing, every, rows)
            chosen, _ = self.runner.compute(step)
            drafts.append(chosen.tokens.clamp(min=0))  # a copy: a graph writes to the same place again
        tokens = torch.stack(drafts, 1)
        if self._peers is not None:  # the tokens to verify must be equal, to the last bit of every rank's logits
            tokens = self._peers.sum(tokens if self._peers.rank == 0 else torch.zeros_like(tokens))
        return tokens

    def _first(self, work: DraftInput) -> Tensor:
        """Compute the last known tokens, and return the first draft token of each request [requests]."""
        runner = self.runner
        tokens = np.minimum(work.tokens, runner.vocabulary - 1)  # its vocabulary may be the smaller one
        rows = work.rows[: work.requests]
        last = np.cumsum(work.counts, dtype=np.int32)[: work.requests] - 1
        step = StepInput(work.rows, work.counts, work.ends, 0, tokens, last, rows)
        # A graph samples after every token.
        every = replace(
            step, sampled=np.arange(len(tokens), dtype=np.int32), sampled_rows=work.rows.repeat(LAST_TOKENS)
        )
        if work.requests == len(work.rows) and runner.graphs is not None and runner.graphs.takes(every):
            step = every
        chosen, _ = runner.compute(step)
        first = chosen.tokens.clamp(min=0)
        if step is every:
            first = first[LAST_TOKENS - 1 :: LAST_TOKENS]
        if work.requests:
            runner.set_next_tokens(rows, first)
        return first
