"""This rank's position in the layout: its device meshes, its coordinates, and its process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from craton.job.layout import Layout
from craton.ml.collectives import ALONE, Connections, Peers

DIMENSIONS = ("pp", "replicate", "fsdp", "cp", "tp")


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a layout; dimensions of size one are omitted, except `shard`."""

    weights: DeviceMesh  # pp, replicate, shard = fsdp · cp, tp
    experts: DeviceMesh | None  # pp, replicate, shard = the rest of fsdp · cp · tp after ep, ep


@dataclass(frozen=True)
class Ranks:
    """This rank's position in the layout."""

    layout: Layout
    device: torch.device
    rank: int
    meshes: Meshes | None = None  # None: one rank, no process group
    connections: Connections = ALONE
    pipeline: Peers | None = None  # the ranks of this rank's pipeline, in stage order
    lanes: tuple[tuple[Peers, ...], ...] = ()  # the same ranks, for messages forward and backward: see `pipeline`

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def place(self) -> dict[str, int]:
        """This rank's index in every dimension of the layout."""
        place, rest = {}, self.rank
        for name in reversed(DIMENSIONS):
            rest, place[name] = divmod(rest, getattr(self.layout, name))
        return place

    @property
    def data_rank(self) -> int:
        """This rank's index among the data-parallel ranks, which see different samples."""
        return self.place["replicate"] * self.layout.fsdp + self.place["fsdp"]

    @property
    def data_world(self) -> int:
        return self.layout.data_parallel

    @property
    def counts_labels(self) -> bool:
        """Whether this rank counts the labels for its pipeline and tensor-parallel group."""
        return self.place["pp"] == 0 and self.place["tp"] == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank counts the loss for its pipeline and tensor-parallel group."""
        return self.place["pp"] == self.layout.pp - 1 and self.place["tp"] == 0

    @property
    def peers(self) -> tuple[Peers, ...]:
        """All process groups that this rank uses inside a step."""
        pipeline = () if self.pipeline is None else (self.pipeline,)
        return (*self.connections.all, *pipeline, *(lane for lanes in self.lanes for lane in lanes))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place and on the device; ranks that hold copies must pass zeros."""
        if self.meshes is not None:
            dist.all_reduce(tensor)
        return tensor
