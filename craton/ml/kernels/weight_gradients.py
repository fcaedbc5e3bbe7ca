"""Deferred weight gradients: a zero-bubble pipeline passes on the gradient of the input first.

The backward pass of our own layers calls `weight_gradient` for each weight. Outside `put_off` the gradient is computed
at once. Inside, it is deferred to `LateGradients.run`, which adds it to `parameter.grad` later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from craton.ml.collectives import like

Compute = Callable[[], Tensor]  # computes the gradient of this rank's part of a weight


class LateGradients:
    """Weight gradients still to be computed, in the order of the backward pass."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Compute]] = deque()

    def add(self, parameter: Tensor, compute: Compute) -> None:
        self._waiting.append((parameter, compute))

    def take(self, parameters: Iterable[Tensor]) -> LateGradients:
        """Remove and return those of the given parameters."""
        own, taken, left = {id(parameter) for parameter in parameters}, LateGradients(), LateGradients()
        for parameter, compute in self._waiting:
            (taken if id(parameter) in own else left).add(parameter, compute)
        self._waiting = left._waiting
        return taken

    @torch.no_grad()
    def run(self) -> None:
        """Compute all of them; the inputs of each are freed as soon as it is done."""
        while self._waiting:
            parameter, compute = self._waiting.popleft()
            gradient = like(parameter, compute())
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


_open: list[LateGradients] = []  # per process: autograd runs the backward pass of a GPU in its own thread


@contextmanager
def put_off(late: LateGradients) -> Iterator[None]:
    """Defer weight gradients inside the context."""
    _open.append(late)
    try:
        yield
    finally:
        _open.pop()


def weight_gradient(parameter: Tensor, compute: Compute) -> Tensor | None:
    """Return what a Function's backward returns for a weight; None if the weight is frozen or its gradient deferred.

    `parameter` is the one that forward received, kept as an attribute of ctx. With activation checkpointing, saved
    tensors are copies whose `grad` is never read.
    """
    if not parameter.requires_grad:
        return None
    if not _open:
        return like(parameter, compute())
    _open[-1].add(parameter, compute)
    return None
