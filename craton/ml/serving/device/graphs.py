"""Whole decode steps as CUDA graphs: model, head and sampler, for a set of batch sizes.

A step uses the next larger graph; padding requests fill it up and use the dummy row and block. Graphs see only
addresses that never change: tables, weights, the KV cache, and small buffers for rows, lengths and tokens. With
speculative decoding there are also graphs for steps in which every request has the same number of draft tokens. With
`shares_prefixes` there are also graphs of steps whose attention reads shared prefixes once per group, used for steps
that have such groups. Without CUDA the same steps run eagerly, as in tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from craton.ml.collectives import Peers
from craton.ml.kernels.serving import SharedPrefixes
from craton.ml.serving.device.sampler import Chosen
from craton.ml.serving.device.shared_prefix import group_numbers, shared_prefixes
from craton.ml.serving.device.upload import Upload
from craton.ml.serving.schedule import MAX_GROUPS, PrefixGroups, StepInput

WARM_UPS = 2
MAX_DRAFTED = 256  # tokens of a step with drafts: above it compute, not weight reads, bounds the step

Outputs = tuple[Tensor, ...]
GraphKind = tuple[int, int, bool]  # requests, tokens of each, and whether prefixes are shared


def graph_sizes(largest: int, multiple: int = 1) -> list[int]:
    """Batch sizes: 1, 2, 4, 8, then every 8 up to 256, then every 32; each rounded up to a multiple of the ranks."""
    sizes = [1, 2, 4, *range(8, min(largest, 256) + 1, 8), *range(288, largest + 1, 32)]
    wanted = [size for size in sizes if size < largest] + [largest]
    return sorted({-(-size // multiple) * multiple for size in wanted})


class DecodeRunner(Protocol):
    """The runner interface that graphs need to capture its steps."""

    device: torch.device
    dtype: torch.dtype
    peers: Peers | None
    rows: int
    upload: Upload
    vocabulary: int

    def decode_body(
        self,
        rows: Tensor,
        lengths: Tensor,
        logits: Tensor,
        tokens: Tensor | None = None,
        shared: SharedPrefixes | None = None,
    ) -> Outputs: ...


class DecodeGraphs:
    """One graph per batch size, made by `capture`; before that no step can use them."""

    def __init__(
        self, runner: DecodeRunner, largest: int, draft_lengths: Sequence[int] = (), shares_prefixes: bool = False
    ) -> None:
        self._runner, self._shares_prefixes = runner, shares_prefixes
        multiple = 1 if runner.peers is None else runner.peers.size
        self.sizes = {1: graph_sizes(largest, multiple)}
        for queries in sorted(1 + length for length in draft_lengths):
            self.sizes[queries] = graph_sizes(max(1, min(largest, MAX_DRAFTED // queries)), multiple)
        largest = self.sizes[1][-1]
        rows = max(queries * sizes[-1] for queries, sizes in self.sizes.items())
        device = runner.device
        self._inputs = torch.zeros(2, largest, dtype=torch.int32, device=device)  # rows, lengths
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # of steps with drafts
        self._logits = torch.empty(rows, runner.vocabulary, dtype=runner.dtype, device=device)
        self._groups = torch.zeros(3 * (largest + MAX_GROUPS), dtype=torch.int32, device=device)
        self._steps: dict[GraphKind, tuple[Callable[[], None], Outputs]] = {}

    def capture(self) -> None:
        """Capture all graphs, the largest first, so that all share its memory pool."""
        gc.collect()
        pool = None
        with torch.inference_mode():
            for kind, body in self.bodies():
                if self._runner.device.type == "cuda":
                    graph, outputs = capture_graph(body, WARM_UPS if pool is None else 1, pool)
                    pool = pool or graph.pool()
                    self._steps[kind] = (graph.replay, outputs)
                else:
                    self._steps[kind] = _repeat(body)

    def bodies(self) -> Iterator[tuple[GraphKind, Callable[[], Outputs]]]:
        """The steps to capture, the largest first; each must run before the next one is asked for."""
        for queries, sizes in self.sizes.items():
            kinds = (False, True) if self._shares_prefixes and queries == 1 else (False,)
            for size, is_shared in product(reversed(sizes), kinds):
                self._fill(size, queries, np.zeros(0, np.int32), np.zeros(0, np.int32))
                self._fill_groups(size, None)
                yield (size, queries, is_shared), self._body(size, queries, is_shared)

    def drop(self) -> None:
        self._steps.clear()

    def takes(self, work: StepInput) -> bool:
        """Whether every request has one token, or the same number of drafts, and a graph is large enough."""
        requests, queries = len(work.rows), int(work.counts[0])
        return (
            bool(self._steps)
            and queries in self.sizes
            and requests <= self.sizes[queries][-1]
            and bool((work.counts == queries).all())
            and len(work.sampled) == requests * queries
        )

    def replay(self, work: StepInput, placed: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Chosen, Tensor]:
        """Run a step; return (logits, sampled tokens, their positions), valid until the next replay. `placed`: indices
        of tokens that are on the device only, and these tokens."""
        requests, queries = len(work.rows), int(work.counts[0])
        size = next(size for size in self.sizes[queries] if size >= requests)
        self._fill(size, queries, work.rows, work.lengths)
        if queries > 1:
            self._tokens[: len(work.tokens)].copy_(self._runner.upload.send(work.tokens))
            if placed is not None:
                self._tokens[placed[0]] = placed[1]
        is_shared = self._shares_prefixes and queries == 1 and work.groups is not None
        if is_shared:
            self._fill_groups(size, work.groups)
        step, (tokens, logprobs, positions) = self._steps[size, queries, is_shared]
        step()
        count = requests * queries
        return self._logits[:count], Chosen(tokens[:count], logprobs[:count]), positions[:count]

    def _fill(self, size: int, queries: int, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Write rows and lengths of the requests, and of padding requests up to `size`, which have only this step's
        tokens."""
        inputs = np.empty((2, size), np.int32)
        inputs[0, : len(rows)], inputs[0, len(rows) :] = rows, self._runner.rows - 1
        inputs[1, : len(rows)], inputs[1, len(rows) :] = lengths, queries
        self._inputs[:, :size].copy_(self._runner.upload.send(inputs))

    def _fill_groups(self, size: int, groups: PrefixGroups | None) -> None:
        numbers = group_numbers(groups, size)
        self._groups[: len(numbers)].copy_(self._runner.upload.send(numbers))

    def _body(self, size: int, queries: int, is_shared: bool) -> Callable[[], Outputs]:
        rows, lengths = self._inputs[0, :size], self._inputs[1, :size]
        count = size * queries
        tokens = self._tokens[:count] if queries > 1 else None
        shared = shared_prefixes(self._groups[: 3 * (size + MAX_GROUPS)], size) if is_shared else None
        return lambda: self._runner.decode_body(rows, lengths, self._logits[:count], tokens, shared)


def capture_graph(body: Callable[[], Outputs], warm_ups: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Run the body a few times, then capture it; its outputs have fixed addresses."""
    for _ in range(warm_ups):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = body()
    return graph, outputs


def _repeat(body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Return an eager step that writes its results to the same tensors each time, as a graph does."""
    outputs = tuple(item.clone() for item in body())

    def step() -> None:
        for kept, new in zip(outputs, body(), strict=True):
            kept.copy_(new)

    return step, outputs
