"""Which requests of a decode step share a prefix of their KV cache, for the kernels and their PyTorch twins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decoding requests whose rows of the block table begin with the same blocks. All int32, on the device.

    A group's tokens are a multiple of the page, and before the token that each of its requests decodes. Unused groups
    follow the others: they end where the last one ends and have no tokens."""

    members: Tensor  # [requests]: the requests of all groups, one group after another
    places: Tensor  # [requests]: where each request is in `members`; -1: it is in no group
    skipped: Tensor  # [requests]: tokens that its group shares; 0: it is in no group
    ends: Tensor  # [groups]: where each group's members end
    rows: Tensor  # [groups]: a row of the block table that begins with the shared blocks
    tokens: Tensor  # [groups]: shared by the group's members
