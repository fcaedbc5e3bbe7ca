"""What a rank records of its collectives: those of its current generation, with the members of their groups."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from gang import Gang
from waiting import wait_until

from craton.ml.training.flight_recorder import begin_recording, write_recording
from craton.observability.diagnosis.collect.collectives import read_dump, read_dumps, stuck_collectives


def work_together(times: int) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(4))


def wait_for_a_rank(folder: Path, late: int) -> None:
    """Three collectives of all ranks, of which one rank enters the last only after all have written a recording."""
    begin_recording()
    rank, path = dist.get_rank(), folder / f"rank_{dist.get_rank()}"
    control = dist.new_group()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
    work_together(2)
    waiting = dist.all_reduce(torch.ones(4), async_op=True) if rank != late else None

    def is_settled() -> bool:
        """Gloo marks a collective as over a moment after it has returned."""
        write_recording(path)
        recording = read_dump(path)
        return recording is not None and sum(not entry["retired"] for entry in recording["entries"]) == (rank != late)

    wait_until(is_settled)
    dist.barrier(control)
    if waiting is None:
        work_together(1)
    else:
        waiting.wait()


def test_a_recording_has_nothing_of_earlier_generations(gang: Gang, tmp_path: Path) -> None:
    """Their groups have the same names, and count from 1 as well: rank 1 would seem to have entered more."""
    gang.run(work_together, 7, ranks=4)
    gang.run(wait_for_a_rank, tmp_path, 1, ranks=4)
    dumps, failed = read_dumps([tmp_path / "rank_"])
    assert (sorted(dumps), failed) == ([0, 1, 2, 3], [])
    (stuck,) = stuck_collectives(dumps, set(dumps))
    assert (stuck.operation, stuck.description, stuck.missing) == ("gloo:all_reduce", "default_pg", (1,))
    assert stuck.expected == (0, 1, 2, 3)
    assert [len(dumps[rank]["entries"]) for rank in range(4)] == [4, 3, 4, 4]


def test_a_recording_names_the_members_of_every_group(gang: Gang, tmp_path: Path) -> None:
    """On gloo PyTorch records none, and ranks outside a group would seem to be missing in its collectives."""
    gang.run(wait_for_a_rank, tmp_path, 3, ranks=4)
    dumps, _ = read_dumps([tmp_path / "rank_"])
    members = [{group["ranks"] for group in dumps[rank]["pg_config"].values()} for rank in range(4)]
    assert [("[0, 1]" in groups, "[2, 3]" in groups) for groups in members] == [(True, False)] * 2 + [(False, True)] * 2
    assert all("[0, 1, 2, 3]" in groups for groups in members)
