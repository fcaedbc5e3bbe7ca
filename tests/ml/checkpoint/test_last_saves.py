"""A state that may be the only copy: room is made for it, and the run directory takes it when no tier does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gang import Gang
from mounting import make_read_only, make_writable
from s3 import FaultProxy
from states import equal, numbers, rank_and_world, single, wait_for_report
from torch import Tensor

from craton.ml.training.checkpoint import Checkpointer, CheckpointError, TierFolder, find_checkpoint


def large(step: int) -> dict[str, Tensor]:
    """400 kB, of which a disk of 1 MiB holds two."""
    return {"model.weight": torch.full((100_000,), float(step))}


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def rescue_of(path: Path) -> TierFolder:
    return TierFolder("rescue", path / "rescue", keep=1)


def test_a_save_without_room_gives_up_what_keep_does_not_ask_for(small_disk: Path) -> None:
    checkpointer = single([TierFolder("shared", small_disk, keep=2)])
    for step in (1, 2):
        checkpointer.save(step, large(step), {}, wait=True)
    checkpointer.save(3, large(3), {})
    report = wait_for_report(checkpointer, 3, "shared")
    assert (report.outcome, report.removed) == ("saved", ("step-00000001",))
    assert steps_of(small_disk) == ["step-00000002", "step-00000003"]
    found = large(0)
    assert checkpointer.restore(found) == {"step": 3}
    assert equal(found, large(3))


def test_what_a_killed_save_left_makes_room(small_disk: Path) -> None:
    checkpointer = single([TierFolder("shared", small_disk)])
    checkpointer.save(1, large(1), {}, wait=True)
    left = small_disk / "step-00000002.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(bytes(500_000))
    checkpointer.save(3, large(3), {}, wait=True)
    assert steps_of(small_disk) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("keep", [1, None])
def test_the_last_step_before_is_never_given_up_for_a_new_one(small_disk: Path, keep: int | None) -> None:
    checkpointer = single([TierFolder("shared", small_disk, keep=keep)])
    checkpointer.save(1, large(1), {}, wait=True)
    (small_disk / "other").write_bytes(bytes(400_000))
    with pytest.raises(CheckpointError, match=r"is full.*step 1 is intact"):
        checkpointer.save(2, large(2), {}, wait=True)
    assert steps_of(small_disk) == ["step-00000001"]


def test_steps_stay_when_giving_them_up_would_not_make_enough_room(small_disk: Path) -> None:
    checkpointer = single([TierFolder("shared", small_disk, keep=2)])
    for step in (1, 2):
        checkpointer.save(step, numbers(step), {}, wait=True)
    with pytest.raises(CheckpointError, match=r"is full.*step 2 is intact"):
        checkpointer.save(3, {**numbers(3), "model.more": torch.zeros(400_000)}, {}, wait=True)
    assert steps_of(small_disk) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_the_run_directory_takes_what_the_tier_does_not_and_gives_it_back(
    small_disk: Path, tmp_path: Path, fault: str
) -> None:
    tier = TierFolder("shared", small_disk / "run")
    checkpointer = Checkpointer([tier], 0, 1, rescue=rescue_of(tmp_path))
    checkpointer.save(1, large(1), {}, wait=True)
    assert not (tmp_path / "rescue").exists(), "a run whose tiers work has no such folder"
    if fault == "full":
        (small_disk / "other").write_bytes(bytes(400_000))
    elif fault == "read-only":
        make_read_only(small_disk)
    else:
        (small_disk / "run").rename(small_disk / "away")
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        checkpointer.save(2, large(2), {"next_sample": 9}, wait=True)
    checkpointer.rescue(2, large(2), {"next_sample": 9})
    assert find_checkpoint([tier, rescue_of(tmp_path)]).tier == "rescue"

    if fault == "full":
        (small_disk / "other").unlink()
    elif fault == "read-only":
        make_writable(small_disk)
    else:
        (small_disk / "away").rename(small_disk / "run")
    again = Checkpointer([tier], 0, 1, rescue=rescue_of(tmp_path))
    found = large(0)
    assert again.restore(found) == {"step": 2, "next_sample": 9}
    assert equal(found, large(2))
    assert wait_for_report(again, 2, "shared").outcome == "moved"
    again.wait()
    assert steps_of(tmp_path / "rescue") == [], "the tier has it"
    assert find_checkpoint([tier]).step == 2


def test_a_vanished_run_directory_is_not_made_again_by_a_rescue(tmp_path: Path) -> None:
    checkpointer = Checkpointer([TierFolder("shared", tmp_path / "tier")], 0, 1, rescue=rescue_of(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match=r"step 1 was not saved to .*rescue: No such file"):
        checkpointer.rescue(1, numbers(1), {})
    assert not (tmp_path / "gone").exists()


def test_s3_that_is_down_at_the_end_leaves_the_state_in_the_run_directory(
    tmp_path: Path, bucket: str, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("craton.infrastructure.storage.s3.PAUSE_SECONDS", 0.01)
    checkpointer = Checkpointer([TierFolder("s3", f"{bucket}/run")], 0, 1, rescue=rescue_of(tmp_path))
    faults.fail("503", method="PUT")
    with pytest.raises(CheckpointError, match="503"):
        checkpointer.save(5, numbers(5), {}, wait=True)
    checkpointer.rescue(5, numbers(5), {})
    found = numbers(0)
    assert checkpointer.restore(found) == {"step": 5}
    assert equal(found, numbers(5))


def lose_one_node(path: Path) -> tuple[str, list[str], str]:
    """Rank 1 cannot write its shard to either tier; what both ranks hear of that, and where the state went."""
    rank, world = rank_and_world()
    tiers = [
        TierFolder("nvme", path / f"host-{rank}", node=f"node-{rank}"),
        TierFolder("shared", path / f"seen-{rank}"),
    ]
    checkpointer = Checkpointer(tiers, rank, world, rescue=rescue_of(path))
    if rank == 1:
        shutil.rmtree(path / "host-1")
    try:
        checkpointer.save(3, numbers(3), {}, wait=True)
    except CheckpointError as error:
        problem = str(error)
    checkpointer.rescue(3, numbers(3), {})
    outcomes = [f"{report.tier} {report.outcome}" for report in checkpointer.reports()]
    found = numbers(0)
    assert checkpointer.restore(found) == {"step": 3}
    assert equal(found, numbers(3))
    assert checkpointer.restored is not None
    return problem, sorted(outcomes), checkpointer.restored.tier


def test_all_ranks_agree_when_the_shard_of_one_fails(gang: Gang, tmp_path: Path) -> None:
    first, second = gang.run(lose_one_node, tmp_path, ranks=2)
    assert first == second
    problem, outcomes, tier = first
    assert "rank 1: " in problem
    assert outcomes == ["nvme failed", "rescue saved", "shared failed"]
    assert tier == "rescue"


def test_a_tier_that_fails_while_a_run_recovers_does_not_end_it(small_disk: Path) -> None:
    tier = TierFolder("shared", small_disk)
    single([tier]).save(1, numbers(1), {}, wait=True)
    make_read_only(small_disk)
    with pytest.raises(CheckpointError, match=r"cannot be used: .*Read-only"):
        single([tier])
    with pytest.warns(UserWarning, match=r"cannot be used: .*joins the next save"):
        checkpointer = Checkpointer([tier], 0, 1, continues=True)
    assert checkpointer.restore(numbers(0)) == {"step": 1}
    make_writable(small_disk)
    checkpointer.save(2, numbers(2), {}, wait=True)
    assert find_checkpoint([tier]).step == 2
