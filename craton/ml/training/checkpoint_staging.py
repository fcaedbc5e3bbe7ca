"""What stands between training and the files: a copy of the state in CPU memory, a plan that points at the copy, and a
process group in which the ranks agree on what became of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

WRITE_TIMEOUT = timedelta(hours=2)  # how long one rank waits for another's files


def local_data(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor, with everything computed that was still under way."""
    local = {name: (t.to_local() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}
    _synchronize(local)
    return local


class Staging:
    """Copies in CPU memory, page-locked when they come from a GPU, in buffers that are kept for the next save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, local: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """None, out loud, when the memory for them is not there."""
        held = {name: self._buffers[name] for name in local if name in self._buffers}
        self._buffers = {name: held[name] for name in held if _alike(held[name], local[name])}
        missing = {name: tensor for name, tensor in local.items() if name not in self._buffers}
        needed = sum(_buffer_bytes(tensor) for tensor in missing.values())
        if needed > (free := _free_memory_bytes()):
            self._buffers = {}
            warnings.warn(
                f"a copy of the state needs {needed:,} bytes of memory and this rank's share of what is free is "
                f"{free:,.0f}; training waits until the checkpoint is written",
                stacklevel=3,
            )
            return None
        for name, tensor in missing.items():
            self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        for name, tensor in local.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        _synchronize(local)
        return dict(self._buffers)


class LocalDataPlanner(dcp.DefaultSavePlanner):
    """Plans by the tensors' shapes and placements, writes the local data given beside them. The plan is remembered from
    save to save under a key, so that only the first one sends it to the coordinator."""

    def __init__(self, data: Mapping[str, Tensor], key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key  # else shared by every planner of this class in the process
        self._data = data

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._data[index.fqn]


class Ranks:
    """Objects between ranks over a gloo group of its own; alone, without one."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if world > 1 else None

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def of_rank_0(self, value: Any) -> Any:
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def flags_of_rank_0(self, flags: list[bool]) -> list[bool]:
        if self.group is None:
            return flags
        tensor = torch.tensor(flags)
        dist.broadcast(tensor, src=0, group=self.group)
        return [bool(flag) for flag in tensor.tolist()]


def file_threads() -> int:
    """Of this rank for files: half of its share of the cores, as training goes on meanwhile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // _local_world() // 2))


def _synchronize(local: Mapping[str, Tensor]) -> None:
    for device in {tensor.device for tensor in local.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _buffer_bytes(tensor: Tensor) -> int:
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes  # as torch rounds pinned memory


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.is_pinned() == other.is_cuda


def _free_memory_bytes() -> float:
    """This rank's share of what the machine, or its container, has free; nine tenths of it."""
    free = float("inf")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(values["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdigit():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, int(limit) - int((group / "memory.current").read_text()) + int(stat["file"]))
    return 0.9 * free / _local_world()


def _local_world() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
