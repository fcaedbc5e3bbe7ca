"""What ranks say to each other inside a model: gathers, sums and exchanges, with and without gradients.

Every collective of the models goes through `Peers`, so that one place can time them, trace them or leave one out in a
test. They are torch's functional collectives, the same on gloo and NCCL: `start_…` returns at once, `wait` makes the
computation wait; only gloo is waited for at the start. Tensors are gathered and scattered along their first dimension.
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
    """This rank and those it shares one dimension of the layout with."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around every wait, for a timer
        self._name = group.group_name
        # gloo runs what was started in two threads. With two collectives of one group under way ranks died now and then
        # of a spoilt heap (torch 2.13, both threads in gloo::allgather); with one at a time none has.
        self._one_at_a_time = dist.get_backend(group) == "gloo"

    def start_gather(self, x: Tensor) -> Tensor:
        """[n, …] of every rank → [size · n, …]."""
        return self._started(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.size, self._name))

    def start_scatter_sum(self, x: Tensor) -> Tensor:
        """[size · n, …] → this rank's [n, …] of the sum over ranks."""
        scatter = torch.ops._c10d_functional.reduce_scatter_tensor
        return self._started(scatter(x.contiguous(), "sum", self.size, self._name))

    def start_exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Rows for every rank, `sent[r]` of them for rank r → `received[r]` rows from each."""
        all_to_all = torch.ops._c10d_functional.all_to_all_single
        return self._started(all_to_all(x.contiguous(), list(received), list(sent), self._name))

    def start_sum(self, x: Tensor, operation: str = "sum") -> Tensor:
        """The sum (or "max") over ranks, a new tensor."""
        return self._started(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, self._name))

    def wait(self, started: Tensor) -> Tensor:
        """What was started, usable from here on."""
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
    """Whom the layers of a model talk to; None where the layout has nobody there."""

    tensor: Peers | None = None  # tp: each holds some heads, columns and vocabulary, and a share of the tokens
    context: Peers | None = None  # cp: each holds two pieces of every sequence
    experts: Peers | None = None  # ep: each holds some experts
    rows: Peers | None = None  # cp · tp: all that hold tokens of the same samples
    stage: Peers | None = None  # all ranks with the same layers

    @property
    def all(self) -> tuple[Peers, ...]:
        return tuple(
            peers for peers in (self.tensor, self.context, self.experts, self.rows, self.stage) if peers is not None
        )


ALONE = Connections()


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, for code that writes its own gradients."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a gradient as the gradient of a parameter, cut as that is."""
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
    """This rank's part of a parameter, differentiable, for plain operations. The gradient stays what this rank found:
    of a parameter that is not cut it is only a share."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Which part of a whole parameter this rank holds, whatever was cut first: tensor parallelism, experts, FSDP."""
    if not isinstance(parameter, DTensor):
        return (slice(None),) * parameter.ndim
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def gather(x: Tensor, peers: Peers) -> Tensor:
    """Everyone's rows; the gradient is summed and scattered."""
    out: Tensor = _Gather.apply(x, peers)
    return out


def scatter_sum(x: Tensor, peers: Peers) -> Tensor:
    """This rank's rows of the sum; the gradient is gathered."""
    out: Tensor = _ScatterSum.apply(x, peers)
    return out


def exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], peers: Peers) -> Tensor:
    """Rows to and from every rank; the gradient goes back the same way."""
    out: Tensor = _Exchange.apply(x, received, sent, peers)
    return out


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
