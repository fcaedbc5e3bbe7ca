"""A rank that dies while another one waits for a save is told as what it is: neither a checkpoint that failed nor
memory that cannot be used, for which the others would be blamed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from keepers import Keepers
from nodes import Nodes, nodes_of
from states import numbers
from waiting import PATIENCE_SECONDS

from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.ml.training.checkpoint.checksums import RanksLostError

Told = tuple[str, list[str]]


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_dead(rank: int, nodes: Nodes, folder: Path, waits_for: str, told: Queue[Told]) -> None:
    """Rank 1 dies in the middle of a save; what rank 0 raises, and what it says of the nodes' memory."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    checkpointer = Checkpointer([TierFolder("shared", folder / "shared")], rank, 2, nodes.setup())
    tensors = numbers(1)
    checkpointer.reserve(tensors)
    assert checkpointer._peer is not None
    if rank == 1:
        checkpointer._peer.client.filled = die  # type: ignore[method-assign]
        checkpointer._lanes["shared"]._write_shards = die  # type: ignore[method-assign]
    try:
        if waits_for == "shared":
            checkpointer.save(1, tensors, {}, wait=True)
        else:
            assert checkpointer.due(1)
            checkpointer.save(1, tensors, {})
            checkpointer.wait()
    except RanksLostError as error:
        told.put((str(error), [note.event for note in checkpointer.notes()]))
    told.close()
    told.join_thread()
    os._exit(0)


@pytest.mark.parametrize("waits_for", ["shared", "peer"])
def test_a_rank_that_is_waited_for_dies(keepers: Keepers, tmp_path: Path, waits_for: str) -> None:
    nodes = nodes_of([keepers.start("node-0"), keepers.start("node-1")], 1)
    context = multiprocessing.get_context("fork")
    told: Queue[Told] = context.Queue()
    arguments = (nodes, tmp_path, waits_for, told)
    ranks = [context.Process(target=wait_for_the_dead, args=(rank, *arguments)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        text, notes = told.get(timeout=PATIENCE_SECONDS)
        assert text.startswith("gloo: ")
        assert notes == []
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
