"""Collectives inside a model, with and without gradients: all-gather, reduce-scatter, all-reduce and all-to-all.

All collectives of the models go through `Peers`, so one place can time them, trace them, or skip one in a test. They
are torch's functional collectives, the same on gloo and NCCL: `start_…` returns at once, `wait` makes the computation
wait. On gloo the start waits too. Tensors are gathered and scattered along their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Peers:
    """A process group for one dimension of the layout: this rank and the ranks it communicates with."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around every wait, for a timer
        self._name = group.group_name
        # gloo runs started collectives in two threads. With two of one group in flight, ranks sometimes crashed with a
        # corrupted heap (torch 2.13, both threads in gloo::allgather). With one at a time none has.
        self._one_at_a_time = dist.get_backend(group) == "gloo"

    def start_gather(self, x: Tensor) -> Tensor:
        """All-gather: [n, …] of every rank → [size · n, …]."""
        return self._started(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.size, self._name))

    def start_scatter_sum(self, x: Tensor) -> Tensor:
        """Reduce-scatter: [size · n, …] → this rank's [n, …] of the sum over ranks."""
        scatter = torch.ops._c10d_functional.reduce_scatter_tensor
        return self._started(scatter(x.contiguous(), "sum", self.size, self._name))

    def start_exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """All-to-all: `sent[r]` rows for each rank r → `received[r]` rows from each."""
        all_to_all = torch.ops._c10d_functional.all_to_all_single
        return self._started(all_to_all(x.contiguous(), list(received), list(sent), self._name))

    def start_sum(self, x: Tensor, operation: str = "sum") -> Tensor:
        """All-reduce: the sum (or "max") over ranks, as a new tensor."""
        return self._started(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, self._name))

    def wait(self, started: Tensor) -> Tensor:
        """Return the result of a started collective, ready to use."""
        return started if self._one_at_a_time else self._wait(started)

    def gather(self, x: Tensor) -> Tensor:
        return self.wait(self.start_gather(x))

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.wait(self.start_scatter_sum(x))

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        return self.wait(self.start_exchange(x, received, sent))

    def sum(self, x: Tensor, operation: str = "sum") -> Tensor:
        return self.wait(self.start_sum(x, operation))

    def _started(self, tensor: Tensor) -> Tensor:
        return self._wait(tensor) if self._one_at_a_time else tensor

    def _wait(self, started: Tensor) -> Tensor:
        with self.waiting():
            done: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return done


@dataclass(frozen=True)
class Connections:
    """The process groups that the layers of a model use; None where the layout has no such dimension."""

    tensor: Peers | None = None  # tp: each holds some heads, columns and vocabulary, and a share of the tokens
    context: Peers | None = None  # cp: each holds two pieces of every sequence
    experts: Peers | None = None  # ep: each holds some of the experts
    rows: Peers | None = None  # cp · tp: all ranks that hold tokens of the same samples
    stage: Peers | None = None  # all ranks with the same layers

    @property
    def all(self) -> tuple[Peers, ...]:
        return tuple(
            peers for peers in (self.tensor, self.context, self.experts, self.rows, self.stage) if peers is not None
        )


ALONE = Connections()


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, for code that computes its own gradients."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as the gradient of a parameter, sharded like it."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def own_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiable, for plain operations. The gradient is not reduced: for a
    replicated parameter it is only this rank's share."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return which part of a whole parameter this rank holds after tensor parallelism, expert parallelism and FSDP."""
    if not isinstance(parameter, DTensor):
        return (slice(None),) * parameter.ndim
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def gather(x: Tensor, peers: Peers) -> Tensor:
    """All-gather rows from all ranks; the gradient is reduce-scattered."""
    out: Tensor = _Gather.apply(x, peers)
    return out


def scatter_sum(x: Tensor, peers: Peers) -> Tensor:
    """Reduce-scatter: return this rank's rows of the sum; the gradient is all-gathered."""
    out: Tensor = _ScatterSum.apply(x, peers)
    return out


def exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], peers: Peers) -> Tensor:
    """All-to-all of rows; the gradient takes the same way back."""
    out: Tensor = _Exchange.apply(x, received, sent, peers)
    return out


def gather_copies(x: Tensor, peers: Peers) -> Tensor:
    """All-gather rows for a computation that every rank repeats: the gradient is this rank's rows of its own."""
    out: Tensor = _GatherCopies.apply(x, peers)
    return out


def sum_over(x: Tensor, peers: Peers | None) -> Tensor:
    """Sum over ranks; the gradient is summed too. Each rank then counts its share of what it computes from the sum."""
    if peers is None:
        return x
    out: Tensor = _Sum.apply(x, peers)
    return out


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.peers.size)[ctx.peers.rank], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(gradient), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.scatter_sum(gradient), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.gather(gradient), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], peers: Peers) -> Tensor:
        ctx.received, ctx.sent, ctx.peers = received, sent, peers
        return peers.exchange(x, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.peers.exchange(gradient, ctx.sent, ctx.received), None, None, None
