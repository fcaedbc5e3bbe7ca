"""Gradients of weights that can be put off: a zero-bubble pipeline passes the input's gradient on first.

The backward pass of our own layers asks `weight_gradient` for the gradient of each weight. Outside `put_off` it is
computed at once. Inside, it is left to `LateGradients.run`, which adds it to `parameter.grad` when there is time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from craton.ml.collectives import like

Compute = Callable[[], Tensor]  # the gradient of the part of a weight that this rank holds


class LateGradients:
    """Gradients of weights that are still to be computed, in the order of the backward pass."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Compute]] = deque()

    def add(self, parameter: Tensor, compute: Compute) -> None:
        self._waiting.append((parameter, compute))

    def take(self, parameters: Iterable[Tensor]) -> LateGradients:
        """Those of some parameters, which leave this queue."""
        own, taken, left = {id(parameter) for parameter in parameters}, LateGradients(), LateGradients()
        for parameter, compute in self._waiting:
            (taken if id(parameter) in own else left).add(parameter, compute)
        self._waiting = left._waiting
        return taken

    @torch.no_grad()
    def run(self) -> None:
        """Computes all of them; what each one held is free as soon as it is done."""
        while self._waiting:
            parameter, compute = self._waiting.popleft()
            gradient = like(parameter, compute())
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


_open: list[LateGradients] = []  # of the process: autograd runs the backward pass of a GPU in a thread of its own


@contextmanager
def put_off(late: LateGradients) -> Iterator[None]:
    """Inside, gradients of weights are left for later."""
    _open.append(late)
    try:
        yield
    finally:
        _open.pop()


def weight_gradient(parameter: Tensor, compute: Compute) -> Tensor | None:
    """What a Function's backward returns for a weight; None where the weight is frozen or its gradient put off.

    `parameter` is the one that forward was given, kept as an attribute of ctx: with recompute, saved tensors are copies
    whose `grad` nobody reads.
    """
    if not parameter.requires_grad:
        return None
    if not _open:
        return like(parameter, compute())
    _open[-1].add(parameter, compute)
    return None
