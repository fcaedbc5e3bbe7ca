"""The gang itself: what the tests of layouts rest on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from gang import Gang, GangError


def _sum_of_ranks(start: int) -> float:
    value = torch.tensor(float(dist.get_rank() + start))
    dist.all_reduce(value)
    return value.item()


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise LookupError("rank one lost its way")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_every_call_has_its_own_group(gang: Gang) -> None:
    members = gang.run(os.getpid, ranks=4)
    assert gang.run(_sum_of_ranks, 10, ranks=2) == [21.0, 21.0]
    assert gang.run(_sum_of_ranks, 1, ranks=4) == [10.0] * 4
    assert gang.run(os.getpid, ranks=4) == members, "nobody was started anew"


@pytest.mark.slow
def test_a_rank_that_raises_is_shown_with_its_traceback() -> None:
    gang = Gang(2)
    try:
        with pytest.raises(GangError, match=r"(?s)rank 1 of 2 raised.*_one_raises.*rank one lost its way"):
            gang.run(_one_raises)
        with pytest.raises(GangError, match="ended with exit code 7"):
            gang.run(_one_dies)
        assert gang.run(_sum_of_ranks, 0) == [1.0, 1.0]
    finally:
        gang.close()
