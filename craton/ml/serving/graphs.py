"""CUDA graphs of whole decode steps: model, head and sampler, for some numbers of requests.

A step takes the next larger one; requests of nobody fill it up, which read and write the dummy's row and block. Graphs
see only addresses that never change: tables, weights, keys and values, and two small buffers with rows and lengths.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from craton.ml.serving.sampler import Chosen

if TYPE_CHECKING:
    from craton.ml.serving.runner import Runner
    from craton.ml.serving.work import Work

WARM_UPS = 2


def graph_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256, then every 32."""
    sizes = [1, 2, 4, *range(8, min(largest, 256) + 1, 8), *range(288, largest + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """One for each size, made when `capture` is called; until then no step is taken."""

    def __init__(self, runner: Runner, largest: int) -> None:
        self._runner = runner
        self.sizes = graph_sizes(largest)
        device = runner.device
        self._inputs = torch.zeros(2, largest, dtype=torch.int32, device=device)  # rows, lengths
        self._logits = torch.empty(largest, runner.vocabulary, dtype=runner.dtype, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self.replays = 0

    def capture(self) -> None:
        """The largest first, so that all share its memory."""
        runner = self._runner
        pool = None
        gc.collect()
        with torch.inference_mode():
            for size in reversed(self.sizes):
                rows, lengths = self._inputs[0, :size], self._inputs[1, :size]
                rows.fill_(runner.rows - 1)
                lengths.fill_(1)
                logits = self._logits[:size]
                for _ in range(WARM_UPS if pool is None else 1):
                    runner.decode_body(rows, lengths, logits)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    tokens, logprobs, positions = runner.decode_body(rows, lengths, logits)
                pool = pool or graph.pool()
                self._graphs[size] = (graph, tokens, logprobs, positions)

    def drop(self) -> None:
        self._graphs.clear()

    def takes(self, work: Work) -> bool:
        """Whether a step is one token of each request, and there is a graph for it."""
        requests = len(work.rows)
        return bool(self._graphs) and work.decode == requests == len(work.sampled) and requests <= self.sizes[-1]

    def replay(self, work: Work) -> tuple[Tensor, Chosen, Tensor]:
        """(logits, what was chosen, positions of it), valid until the next replay."""
        requests = len(work.rows)
        size = next(size for size in self.sizes if size >= requests)
        inputs = np.empty((2, size), np.int32)
        inputs[0, :requests], inputs[0, requests:] = work.rows, self._runner.rows - 1
        inputs[1, :requests], inputs[1, requests:] = work.lengths, 1
        self._inputs[:, :size].copy_(self._runner.upload.send(inputs))
        graph, tokens, logprobs, positions = self._graphs[size]
        graph.replay()
        self.replays += 1
        return self._logits[:requests], Chosen(tokens[:requests], logprobs[:requests]), positions[:requests]
