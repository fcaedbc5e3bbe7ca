"""A process that enters a second group under another rank works on the shard of its new rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from craton.ml.meshes import forget_meshes

WORLD = 4


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()


def offset_of_result(rank: int) -> int:
    """Where the shard of this rank begins, of a tensor that an operation returns."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    result = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None) * 2
    result.redistribute(placements=[Replicate()])
    _, offset = compute_local_shape_and_global_offset(result.shape, result.device_mesh, result.placements)
    dist.destroy_process_group()
    return offset[0]


def gathered_along_one_dimension(rank: int) -> int:
    """Elements that a rank has of seven which two dimensions of a mesh cut, after one of them has gathered its own."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
    cut = distribute_tensor(torch.arange(7.0), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    local = cut.redistribute(placements=[Shard(0), Replicate()]).to_local()
    dist.destroy_process_group()
    return local.numel()


def test_uneven_shards_are_planned_for_the_new_rank() -> None:
    assert gathered_along_one_dimension(0) == 4
    forget_meshes()
    assert gathered_along_one_dimension(3) == 3


def test_a_process_works_on_the_shard_of_its_new_rank() -> None:
    assert offset_of_result(3) == 6
    forget_meshes()
    assert offset_of_result(2) == 4
