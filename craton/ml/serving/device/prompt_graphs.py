"""Whole steps with prompts as CUDA graphs, for a set of token counts: model, head and sampler.

A step may have any mix of decoding requests, prefill chunks and drafts. It uses the graph of the next larger token
count; padding requests have the tokens that are left over. A graph knows only upper bounds of the numbers of requests:
those that decode and are not there have length 0, prefills that are not there have no tokens. Where requests begin,
which positions they are at and which of their tokens are sampled after is in a buffer that every step fills.

Two graphs of a size differ in how many requests may decode, because attention and head of the larger one take longer.
Without CUDA the same steps run eagerly, as in tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from craton.ml.serving.device.graphs import Outputs, capture_graph
from craton.ml.serving.device.sampler import Chosen
from craton.ml.serving.device.upload import Upload
from craton.ml.serving.schedule import Integers, StepInput

MAX_PROMPTS = 64  # requests of a step with more than one token, padding among them
FEW_DECODING = 32
MAX_TOKENS = 4096  # of a graph; a larger step takes the GPU longer than its launches
# (tokens, distance of sizes up to so many): padding is computed, too, and every graph takes time to capture
SIZES = ((768, 64), (1536, 128), (1 << 30, 256))
# KV cache that a graph reads again for every request with a common beginning, at most: to read it takes as long as
# Python needs for the launches of an eager step, which reads it once
MAX_REREAD_BYTES = 4e10


def token_counts(largest: int, multiple: int = 1) -> list[int]:
    """Sizes of graphs, the last one at least `largest`; each a multiple of the ranks."""
    sizes: list[int] = []
    for end, distance in SIZES:
        while (last := sizes[-1] if sizes else 0) < min(end, largest):
            sizes.append(last + distance)
    return sorted({-(-size // multiple) * multiple for size in sizes})


@dataclass(frozen=True)
class PromptInputs:
    """The numbers of a step on the device, int32: views of one buffer. The first `decode` requests decode."""

    decode: int
    rows: Tensor  # [requests]
    lengths: Tensor  # [requests], 0 where there is none
    offsets: Tensor  # [prefills + 1], where the tokens of each begin, and where the last ends
    token_rows: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    tokens: Tensor  # [tokens], -1 where the token table on the device has it
    sampled: Tensor  # [requests], tokens after which one is sampled
    sampled_rows: Tensor  # [requests]


class PromptRunner(Protocol):
    """The runner interface that graphs need to capture its steps."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    longest: int
    upload: Upload
    vocabulary: int

    @property
    def token_bytes(self) -> int: ...

    def prompt_body(self, inputs: PromptInputs, logits: Tensor) -> Outputs: ...


class PromptGraphs:
    """One graph per token count and bound of decoding requests, made by `capture`; before that no step can use them."""

    def __init__(self, runner: PromptRunner, largest: int, max_decoding: int, multiple: int = 1) -> None:
        self._runner = runner
        fits = MAX_PROMPTS * runner.longest  # of padding: a request is never longer than that
        self.sizes = [size for size in token_counts(min(largest, MAX_TOKENS), multiple) if size <= fits]
        self.bounds = sorted({min(max_decoding, FEW_DECODING), max_decoding})
        most = self.bounds[-1] + MAX_PROMPTS
        self._buffer = torch.zeros(5 * most + 3 * max(self.sizes, default=0), dtype=torch.int32, device=runner.device)
        self._logits = torch.empty(most, runner.vocabulary, dtype=runner.dtype, device=runner.device)
        self._steps: dict[tuple[int, int], tuple[PromptInputs, Callable[[], Outputs]]] = {}

    def capture(self) -> None:
        """Capture all graphs, the largest first, so that all share its memory pool."""
        gc.collect()
        pool: Any = None
        with torch.inference_mode():
            for kind, inputs, body in self.bodies():
                if self._runner.device.type == "cuda":
                    graph, outputs = capture_graph(body, 1, pool)
                    pool = pool or graph.pool()
                    body = _replaying(graph, outputs)
                self._steps[kind] = inputs, body

    def bodies(self) -> Iterator[tuple[tuple[int, int], PromptInputs, Callable[[], Outputs]]]:
        """The steps to capture, the largest first; each must run before the next one is asked for."""
        for size, bound in product(reversed(self.sizes), reversed(self.bounds)):
            inputs, body = self._body(size, min(bound, size))
            self._send(_numbers(None, size, inputs.decode, self._runner))
            yield (size, bound), inputs, body

    def drop(self) -> None:
        self._steps.clear()

    def takes(self, work: StepInput) -> bool:
        """Whether a graph is large enough, and the step needs no hidden states and shares no large beginnings."""
        prompts = len(work.rows) - work.decode
        size = self._size(int(work.counts.sum()))
        if size is None or work.prompts or self._bound(work, size) is None:
            return False
        padding = -(-(size - int(work.counts.sum())) // self._runner.longest)
        reread_bytes = 0 if work.groups is None else work.groups.saved_tokens * self._runner.token_bytes
        return bool(self._steps) and prompts + padding <= MAX_PROMPTS and reread_bytes <= MAX_REREAD_BYTES

    def replay(self, work: StepInput, placed: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Chosen, Tensor]:
        """Run a step; return (logits, sampled tokens, their positions), valid until the next replay. `placed`: indices
        of tokens that are on the device only, among those that are sent, and these tokens."""
        size = self._size(int(work.counts.sum()))
        assert size is not None
        bound = self._bound(work, size)
        assert bound is not None
        inputs, step = self._steps[size, bound]
        self._send(_numbers(work, size, inputs.decode, self._runner))
        if placed is not None:
            inputs.tokens[work.decode + placed[0]] = placed[1].int()
        tokens, logprobs, positions = step()
        count = len(work.sampled)
        return self._logits[:count], Chosen(tokens[:count], logprobs[:count]), positions[:count]

    def _size(self, tokens: int) -> int | None:
        return next((size for size in self.sizes if size >= tokens), None)

    def _bound(self, work: StepInput, size: int) -> int | None:
        """The least bound with room for those that decode, and for what is sampled: drafts need more of it."""
        needed = max(work.decode, len(work.sampled) - MAX_PROMPTS)
        return next((bound for bound in self.bounds if min(bound, size) >= needed), None)

    def _send(self, numbers: Integers) -> None:
        self._buffer[: len(numbers)].copy_(self._runner.upload.send(numbers))

    def _body(self, size: int, bound: int) -> tuple[PromptInputs, Callable[[], Outputs]]:
        requests = bound + MAX_PROMPTS
        lengths = (requests, requests, MAX_PROMPTS + 1, size, size, size, requests, requests)
        inputs = PromptInputs(bound, *self._buffer[: sum(lengths)].split(lengths))
        return inputs, lambda: self._runner.prompt_body(inputs, self._logits[:requests])


def _replaying(graph: torch.cuda.CUDAGraph, outputs: Outputs) -> Callable[[], Outputs]:
    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def _numbers(work: StepInput | None, size: int, bound: int, runner: PromptRunner) -> Integers:
    """The numbers of `PromptInputs`, in order; None: padding only."""
    requests, dummy = bound + MAX_PROMPTS, runner.rows - 1
    own_rows, own_lengths, own_counts, sent, sampled, sampled_rows = (
        6 * [np.zeros(0, np.int32)]
        if work is None
        else [work.rows, work.lengths, work.counts, work.tokens, work.sampled, work.sampled_rows]
    )
    decode = 0 if work is None else work.decode
    padding = np.fromiter(_pieces(size - int(own_counts.sum()), runner.longest), np.int32)
    request_rows = np.concatenate((own_rows, np.full(len(padding), dummy, np.int32)))
    request_lengths, counts = np.concatenate((own_lengths, padding)), np.concatenate((own_counts, padding))
    # the requests that decode, and behind the bound of their number the others
    places = np.concatenate((np.arange(decode), bound + np.arange(len(counts) - decode)))
    rows, lengths = np.full(requests, dummy, np.int32), np.zeros(requests, np.int32)
    rows[places], lengths[places] = request_rows, request_lengths
    ends = np.cumsum(counts)
    offsets = np.full(MAX_PROMPTS + 1, size, np.int32)
    offsets[0], offsets[1 : 1 + len(counts) - decode] = decode, ends[decode:]
    positions = np.arange(size) - np.repeat(ends - request_lengths, counts)
    tokens = np.zeros(size, np.int32)
    tokens[:decode], tokens[decode : decode + len(sent)] = -1, sent
    all_sampled, all_rows = np.zeros(requests, np.int32), np.full(requests, dummy, np.int32)
    all_sampled[: len(sampled)], all_rows[: len(sampled)] = sampled, sampled_rows
    fields = (rows, lengths, offsets, np.repeat(request_rows, counts), positions, tokens, all_sampled, all_rows)
    return np.concatenate([entry.astype(np.int32) for entry in fields])


def _pieces(tokens: int, longest: int) -> Iterator[int]:
    """Split tokens into the fewest parts of at most `longest`."""
    while tokens > 0:
        yield min(tokens, longest)
        tokens -= longest
