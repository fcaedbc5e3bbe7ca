"""Deltas of weights: the positions and new values of what changed since the weights that both sides have.

After a step of RL most bf16 weights have the bits they had, so a delta is far smaller than the weights. Bits are
compared, not numbers. A delta is only a shortcut: the checksum of the result decides whether a receiver takes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Slices = tuple[tuple[int, int], ...]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POSITIONS = torch.int32
MAX_POSITIONS = 2**31  # larger shards are sent whole


@dataclass(frozen=True)
class WeightsDelta:
    """What changed in a shard: flat positions, ascending, and the new values there."""

    positions: Tensor  # int32 [changed]
    values: Tensor  # [changed]

    @classmethod
    def between(cls, before: Tensor, after: Tensor) -> WeightsDelta | None:
        """Return the changes from one tensor to another on the host; None where the whole is not larger."""
        if before.dtype != after.dtype or before.shape != after.shape or after.numel() >= MAX_POSITIONS:
            return None
        old, new = (bits_of(tensor) for tensor in (before, after))
        changed = (old != new).nonzero().squeeze(-1)
        if len(changed) * (POSITIONS.itemsize + after.dtype.itemsize) >= after.nbytes:
            return None
        return cls(changed.to(POSITIONS), after.reshape(-1)[changed])

    @classmethod
    def from_bytes(cls, data: Tensor, count: int, dtype: torch.dtype) -> WeightsDelta:
        """Build from `to_bytes`, uint8 [bytes]."""
        middle = count * POSITIONS.itemsize
        return cls(data[:middle].view(POSITIONS), data[middle:].clone().view(dtype))

    def to_bytes(self) -> Tensor:
        """uint8 [bytes]: all positions, then all values."""
        return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in (self.positions, self.values)])

    def apply(self, shard: Tensor) -> bool:
        """Write the changes into a contiguous tensor; False, and nothing is written, if a position is not in it."""
        index = self.positions.long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < shard.numel():
            return False
        shard.view(-1)[index] = self.values
        return True

    @staticmethod
    def num_bytes(count: int, dtype: torch.dtype) -> int:
        return count * (POSITIONS.itemsize + dtype.itemsize)


@dataclass
class HeldWeights:
    """Which weights a receiver has: version and token of the last update that was committed; None: others, or mixed
    ones."""

    version: int | None = None
    token: str | None = None

    def forget(self) -> None:
        self.version = self.token = None


@dataclass
class SentWeights:
    """What a sender sent last, in host memory: the base of its next deltas. Keep one for a set of receivers."""

    version: int | None = None  # None: nothing, or an update that failed
    token: str = ""  # distinguishes it from weights of another sender with the same version
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> HeldWeights:
        """Begin an update; return what a receiver must have to take a delta. Until `commit` there is no base."""
        base = HeldWeights(self.version, self.token)
        self.version, self.token = None, uuid.uuid4().hex
        return base

    def part(self, name: str, slices: Slices) -> Tensor | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else cut(tensor, slices)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Remember a tensor that was sent."""
        kept = self.tensors.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            kept.copy_(tensor)
        else:
            self.tensors[name] = tensor.clone()


def cut(tensor: Tensor, slices: Sequence[Sequence[int]]) -> Tensor:
    """Return a contiguous part of a tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in slices)].contiguous()


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as whole numbers, flat: NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view(-1).view(_BITS[tensor.dtype.itemsize])
