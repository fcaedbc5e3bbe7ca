"""The groups of a step's requests that begin with the same blocks, as numbers for the device.

The size of the array depends only on the number of requests, so a CUDA graph can read it at a fixed address.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from craton.ml.kernels.serving import SharedPrefixes
from craton.ml.serving.schedule import MAX_GROUPS, Integers, PrefixGroups


def group_numbers(groups: PrefixGroups | None, requests: int) -> Integers:
    """Return the groups of this many decoding requests, [3 · requests + 3 · MAX_GROUPS]; None: no groups."""
    of_requests, of_groups = np.zeros((3, requests), np.int32), np.zeros((3, MAX_GROUPS), np.int32)
    of_requests[1] = -1
    if groups is not None:
        count, num_members = len(groups.rows), len(groups.members)
        of_requests[0, :num_members] = groups.members
        of_requests[1, groups.members] = np.arange(num_members)
        of_requests[2, groups.members] = np.repeat(groups.tokens, np.diff(groups.ends, prepend=0))
        of_groups[:, :count] = groups.ends, groups.rows, groups.tokens
        of_groups[0, count:] = num_members
    return np.concatenate((of_requests.reshape(-1), of_groups.reshape(-1)))


def shared_prefixes(numbers: Tensor, requests: int) -> SharedPrefixes:
    """Return views of the numbers of `group_numbers`."""
    of_requests = numbers[: 3 * requests].view(3, requests)
    of_groups = numbers[3 * requests :].view(3, MAX_GROUPS)
    return SharedPrefixes(*of_requests, *of_groups)
