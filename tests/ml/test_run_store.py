"""The run's store as torch sees it: every call that a process group makes, through torch's own wrappers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Gang

from craton.agent.processes import free_port
from craton.agent.store import StoreClient, StoreServer
from craton.ml.store import RunStore, join_group_of_environment

SECRET = b"the secret of this run"
LIMIT_SECONDS = 120.0


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """Under a prefix, so that every call comes out of C++."""
    server = StoreServer("127.0.0.1", SECRET).start()
    made = RunStore(StoreClient(server.address, SECRET, LIMIT_SECONDS))
    yield dist.PrefixStore("generation/3", made)
    made.close()
    server.close()


def test_it_does_what_torchs_own_store_does(store: dist.Store) -> None:
    def calls(one: Any) -> list[Any]:
        one.set("text", "a text")
        one.set("bytes", b"\x00\xff")
        one.multi_set(["m", "n"], ["1", "2"])
        one.append("text", ", and more")
        answers = [one.get("text"), one.get("bytes"), one.multi_get(["n", "m"]), one.add("number", 5)]
        answers += [one.add("number", -7), one.check(["m", "number"]), one.check(["m", "nothing"])]
        for expected, desired in [("x", "y"), ("", "a"), ("", "b"), ("b", "c"), ("a", "d")]:
            answers.append(one.compare_set("compared", expected, desired))
        one.wait(["text"])
        one.wait(["text"], timedelta(seconds=1))
        answers += [one.delete_key("text"), one.delete_key("text"), one.has_extended_api()]
        return answers

    assert calls(store) == calls(dist.PrefixStore("generation/3", dist.HashStore()))
    assert store.num_keys() == 5
    assert store.clone().get("bytes") == b"\x00\xff"


def test_a_key_that_never_comes_is_the_error_that_torch_expects(store: dist.Store) -> None:
    with pytest.raises(dist.DistStoreError, match="did not answer `wait generation/3/never` within"):
        store.wait(["never"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match=r"rendezvous store .* `get generation/3/never`"):
        store.get("never")
    with pytest.raises(dist.DistStoreError):  # from C++, in the middle of making a process group
        dist.ProcessGroupGloo(store, 0, 2, timeout=timedelta(milliseconds=50))


def meet(port: int) -> tuple[list[float], list[Any]]:
    """On a rank: makes groups over the run's store in place of the gang's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join_group_of_environment("gloo", SECRET, rank, world)
    outer = dist.new_group([0, world - 1])
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    words: list[Any] = [None] * world
    dist.all_gather_object(words, f"rank {rank}")
    if rank in (0, world - 1):
        dist.barrier(outer)
    dist.barrier()
    return total.tolist(), words


def test_ranks_make_groups_over_it(gang: Gang) -> None:
    words = ["rank 0", "rank 1", "rank 2"]
    assert gang.run(meet, free_port(), ranks=3) == [([6.0] * 4, words)] * 3
