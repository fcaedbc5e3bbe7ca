"""Between training and the files: a copy of the state in CPU memory, a plan that points at the copy, and a process
group in which the ranks agree on the outcome."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

from craton.infrastructure import free_memory_bytes, usable_cores

FREE_SHARE = 0.9  # share of the free memory for copies; each rank has an equal part of it
WRITE_TIMEOUT = timedelta(hours=2)  # how long one rank waits for another's files


def local_data(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor; a device may still be computing them."""
    return {name: (t.to_local() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}


def synchronize(local: Mapping[str, Tensor]) -> None:
    """Wait until the devices of these tensors have finished all launched work."""
    for device in {tensor.device for tensor in local.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def nothing() -> None:
    """There is nothing to wait for, or to release."""


class StagedState:
    """One copy of this rank's state, from which every due tier writes."""

    def __init__(
        self,
        data: dict[str, Tensor],
        copied: torch.cuda.Event | None,
        users: int,
        free: Callable[[dict[str, Tensor]], None],
    ) -> None:
        self.data, self.copied = data, copied
        self._users, self._free, self._lock = users, free, threading.Lock()

    def wait(self) -> None:
        """Wait until the copy is complete; blocks the writer threads, not training."""
        if self.copied is not None:
            self.copied.synchronize()

    def done(self) -> None:
        """Release one user; the last one frees the memory."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._free(self.data)


class Staging:
    """Copies in CPU memory, in buffers that are reused. While a slow tier still reads one copy, the next one gets
    separate buffers. From a GPU the copy overlaps with computation, into page-locked memory; only a change of the state
    must wait for it (`finish_on_device`)."""

    def __init__(self) -> None:
        self._idle: list[dict[str, Tensor]] = []
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._under_way: torch.cuda.Event | None = None
        self._reserving: threading.Thread | None = None

    def missing_bytes(self, local: Mapping[str, Tensor]) -> float:
        """Return the bytes that a copy needs beyond the free memory; 0 if there is room or a reusable set of
        buffers."""
        with self._lock:
            return self._missing(local, self._idle[-1] if self._idle else {})

    def copy(self, local: Mapping[str, Tensor], users: int) -> StagedState:
        """Make a copy for this many users. The caller has checked for room."""
        with self._lock:
            held = self._idle.pop() if self._idle else {}
        held = _buffers(local, held)
        device = next((tensor.device for tensor in local.values() if tensor.is_cuda), None)
        if device is None:
            _copy(local, held)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy(local, held)
                self._under_way = self._stream.record_event()
        return StagedState(held, self._under_way, users, self._give_back)

    def reserve(self, local: Mapping[str, Tensor], copies: int) -> Callable[[], None]:
        """Allocate the memory of copies in advance; return a function that waits for it. On a GPU's host page-locking
        takes seconds, so it happens in a thread; a save meanwhile waits for its buffers."""
        device = next((tensor.device for tensor in local.values() if tensor.is_cuda), None)
        if device is None:
            self._allocate(local, copies)
            return nothing
        self._reserving = threading.Thread(target=self._allocate, args=(local, copies, device), name="staging")
        self._reserving.daemon = True
        self._reserving.start()
        return self._reserving.join

    def has_reserved(self, seconds: float | None) -> bool:
        """Wait for memory being allocated, which holds the tensors; return whether that has ended."""
        if self._reserving is not None:
            self._reserving.join(seconds)
        return self._reserving is None or not self._reserving.is_alive()

    def _allocate(self, local: Mapping[str, Tensor], copies: int, device: torch.device | None = None) -> None:
        try:
            with nullcontext() if device is None else torch.cuda.device(device), self._lock:
                while len(self._idle) < copies and not self._missing(local, {}):
                    self._idle.append(_buffers(local, {}))
        except RuntimeError as error:
            warnings.warn(f"memory for checkpoints cannot be page-locked in advance: {error}", stacklevel=2)

    def finish_on_device(self) -> bool:
        """Make the device finish a copy in progress before it continues; return whether there was one."""
        event, self._under_way = self._under_way, None
        if event is None:
            return False
        torch.cuda.current_stream().wait_event(event)
        return True

    def _missing(self, local: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> float:
        needed = sum(_buffer_bytes(t) for name, t in local.items() if name not in held or not _alike(held[name], t))
        return max(0.0, needed - FREE_SHARE * free_memory_bytes() / local_world()) if needed else 0.0

    def _give_back(self, buffers: dict[str, Tensor]) -> None:
        """Keep the buffers for the next save: freeing and allocating page-locked memory would block training for
        seconds."""
        with self._lock:
            self._idle.append(buffers)


class LocalDataPlanner(dcp.DefaultSavePlanner):
    """Plans by the tensors' shapes and placements, writes the local data given beside them. The plan is cached from
    save to save under a key, so only the first save sends it to the coordinator."""

    def __init__(self, data: Mapping[str, Tensor], key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key  # otherwise all planners of this class in the process share it
        self._data = data

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._data[index.fqn]


def forget_plan(key: str) -> None:
    """Drop the plan of a key that is no longer used, or that not all ranks may have cached."""
    for name, remembered in vars(SavePlanner).items():  # DCP keeps them in the class forever
        if name.startswith("_cached_") and isinstance(remembered, dict):
            remembered.pop(key, None)


class SavingRanks:
    """Object collectives over a separate gloo group; on a single rank, without one."""

    def __init__(self, world: int, timeout: timedelta = WRITE_TIMEOUT) -> None:
        self.world = world
        self.group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def of_rank_0(self, value: Any) -> Any:
        return self.of_rank(0, value)

    def of_rank(self, rank: int, value: Any) -> Any:
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=rank, group=self.group)
        return values[0]

    def flags_of_rank_0(self, flags: list[bool]) -> list[bool]:
        if self.group is None:
            return flags
        tensor = torch.tensor(flags)
        dist.broadcast(tensor, src=0, group=self.group)
        return [bool(flag) for flag in tensor.tolist()]


def file_threads() -> int:
    """Return this rank's number of file threads: half of its share of the cores, because training runs meanwhile."""
    return max(1, min(4, usable_cores() // local_world() // 2))


def _buffers(local: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one buffer per tensor; reuses those that fit."""
    return {
        name: held[name]
        if name in held and _alike(held[name], tensor)
        else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        for name, tensor in local.items()
    }


def _copy(local: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    for name, tensor in local.items():
        buffers[name].copy_(tensor, non_blocking=True)


def _buffer_bytes(tensor: Tensor) -> int:
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes  # as torch rounds pinned memory


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.is_pinned() == other.is_cuda


def local_world() -> int:
    """Return the number of ranks of this node."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
