"""Collectives on gloo: right, and never two of one group at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gang import Gang
from torch._C._distributed_c10d import _get_work_registry_size

from craton.ml.collectives import Peers


def all_at_once() -> tuple[list[int], list[list[float]]]:
    """How many collectives are under way after each start, and what they brought."""
    peers = Peers(dist.group.WORLD)
    rank, x = peers.rank, torch.arange(4.0)
    under_way, started = [], []
    for start in (
        lambda: peers.start_gather(x[:1] + rank),
        lambda: peers.start_scatter_sum(x),
        lambda: peers.start_exchange(x + 10 * rank, [1] * 4, [1] * 4),
        lambda: peers.start_sum(x[:1] + rank),
        lambda: peers.start_sum(x[:1] + rank, "max"),
    ):
        started.append(start())
        under_way.append(_get_work_registry_size())
    return under_way, [peers.wait(tensor).tolist() for tensor in started]


def test_gloo_is_given_one_collective_at_a_time(gang: Gang) -> None:
    for rank, (under_way, brought) in enumerate(gang.run(all_at_once, ranks=4)):
        assert under_way == [0] * 5
        assert brought == [[0, 1, 2, 3], [4 * rank], [10 * other + rank for other in range(4)], [6], [3]]
