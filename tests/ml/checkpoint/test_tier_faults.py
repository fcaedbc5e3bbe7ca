"""What goes wrong with a tier costs that tier a save: others go on, older steps stay, and it is tried again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from gang import Gang
from mounting import make_read_only, make_writable
from s3 import FaultProxy, S3Server
from states import equal, numbers, rank_and_world, single, wait_for_report
from torch.distributed.checkpoint.planner import SavePlanner

from craton.ml.training.checkpoint import Checkpointer, CheckpointError, TierFolder, find_checkpoint, read_tensors
from craton.ml.training.checkpoint.folder_tier import FolderTier


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    monkeypatch.setattr("craton.infrastructure.storage.s3.PAUSE_SECONDS", 0.01)


def holds(tier: TierFolder, step: int) -> bool:
    found = numbers(0)
    read_tensors(find_checkpoint([tier], step), found)
    return equal(found, numbers(step))


@pytest.mark.parametrize("kind", ["500", "503", "drop", "refuse"])
def test_s3_that_stumbles_is_asked_again(bucket: str, faults: FaultProxy, kind: str) -> None:
    tier = TierFolder("s3", f"{bucket}/run")
    checkpointer = single([tier])
    passing = [faults.fail(kind, 2, method) for method in ("PUT", "GET")]  # type: ignore[arg-type]
    checkpointer.save(1, numbers(1), {}, wait=True)
    found = numbers(0)
    assert checkpointer.restore(found) == {"step": 1}
    assert equal(found, numbers(1))
    assert [fault.times for fault in passing] == [0, 0], "they did happen"


def test_the_plan_of_a_failed_save_does_not_stay_in_memory(bucket: str, faults: FaultProxy, few_attempts: None) -> None:
    checkpointer = single([TierFolder("s3", f"{bucket}/run")])
    remembered = [SavePlanner._cached_save_plan, SavePlanner._cached_metadata]
    before = [len(plans) for plans in remembered]
    checkpointer.save(1, numbers(1), {}, wait=True)
    assert [len(plans) for plans in remembered] == [count + 1 for count in before], "it is made once"
    for step in (2, 3):
        faults.fail("403", method="PUT")
        with pytest.raises(CheckpointError, match=f"step {step} was not saved"):
            checkpointer.save(step, numbers(step), {}, wait=True)
        assert [len(plans) for plans in remembered] == before
        faults.heal()
        checkpointer.save(step + 10, numbers(step), {}, wait=True)
        assert [len(plans) for plans in remembered] == [count + 1 for count in before]
    checkpointer.close()
    assert [len(plans) for plans in remembered] == before


def test_a_tier_that_is_down_misses_steps_and_joins_the_next_save_when_it_is_back(
    tmp_path: Path, bucket: str, faults: FaultProxy, few_attempts: None
) -> None:
    fast, slow = TierFolder("shared", tmp_path, every_steps=1), TierFolder("s3", f"{bucket}/run", every_steps=2)
    checkpointer = single([fast, slow])
    assert checkpointer.due(2)
    checkpointer.save(2, numbers(2), {})
    assert wait_for_report(checkpointer, 2, "s3").outcome == "saved"
    faults.fail("503", method="PUT")
    assert checkpointer.due(4)
    checkpointer.save(4, numbers(4), {})
    failed = wait_for_report(checkpointer, 4, "s3")
    assert failed.outcome == "failed"
    assert failed.error is not None
    assert "tier s3: step 4 was not saved to s3://" in failed.error
    assert "503" in failed.error
    assert "3 attempts" in failed.error
    assert "the checkpoint of step 2 is intact" in failed.error
    faults.heal()
    assert checkpointer.due(5), "only the faster tier is due"
    with pytest.raises(CheckpointError, match="step 4 was not saved"):
        checkpointer.save(5, numbers(5), {})
    assert wait_for_report(checkpointer, 5, "s3").outcome == "saved"
    checkpointer.close()
    assert holds(fast, 4)
    assert holds(slow, 2)
    assert holds(slow, 5)


def test_the_last_step_moves_down_when_the_run_goes_on(
    tmp_path: Path, bucket: str, faults: FaultProxy, few_attempts: None
) -> None:
    fast, slow = TierFolder("shared", tmp_path), TierFolder("s3", f"{bucket}/run", keep=1)
    first = single([fast, slow])
    first.save(1, numbers(1), {}, wait=True)
    faults.fail("500", method="PUT")
    with pytest.warns(UserWarning, match="step 3 was not saved to s3"):
        first.save(3, numbers(3), {"samples": 9}, wait=True)  # it is safe in the shared tier: the run may end
    faults.heal()
    again = single([fast, slow])
    assert again.restore(numbers(0)) == {"samples": 9, "step": 3}
    moved = wait_for_report(again, 3, "s3")
    assert (moved.outcome, moved.error) == ("moved", None)
    found = numbers(0)
    assert single([slow]).restore(found) == {"samples": 9, "step": 3}
    assert equal(found, numbers(3))
    once_more = single([fast, slow])
    once_more.restore(numbers(0))
    once_more.close()
    assert once_more.reports() == [], "what is there already is not copied again"


def test_an_end_that_no_lasting_tier_has_is_an_error(tmp_path: Path, bucket: str, s3_server: S3Server) -> None:
    tiers = [TierFolder("nvme", tmp_path, node="node-0"), TierFolder("s3", f"{bucket}/run")]
    checkpointer = single(tiers)
    s3_server.delete_bucket(bucket.removeprefix("s3://"))
    with pytest.raises(CheckpointError, match="there is no bucket"):
        checkpointer.save(1, numbers(1), {}, wait=True)
    assert checkpointer.restore(numbers(0)) == {"step": 1}


def test_a_folder_that_vanishes_is_not_made_anew_on_another_disk(tmp_path: Path) -> None:
    stays, goes = TierFolder("shared", tmp_path / "stays"), TierFolder("other", tmp_path / "mount" / "run")
    checkpointer = single([stays, goes])
    checkpointer.save(1, numbers(1), {}, wait=True)
    (tmp_path / "mount").rename(tmp_path / "unmounted")
    checkpointer.save(2, numbers(2), {})
    failed = wait_for_report(checkpointer, 2, "other")
    assert failed.error is not None
    assert "check that its file system is mounted" in failed.error
    assert not (tmp_path / "mount").exists()
    (tmp_path / "unmounted").rename(tmp_path / "mount")
    with pytest.raises(CheckpointError, match="mounted"):
        checkpointer.save(3, numbers(3), {})
    assert wait_for_report(checkpointer, 3, "other").outcome == "saved"
    checkpointer.close()
    assert holds(stays, 2)
    assert holds(goes, 1)
    assert holds(goes, 3)


def test_a_tier_that_becomes_read_only_is_told(small_disk: Path) -> None:
    tier = TierFolder("shared", small_disk)
    checkpointer = single([tier])
    checkpointer.save(1, numbers(1), {}, wait=True)
    make_read_only(small_disk)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*step 1 is intact"):
        checkpointer.save(2, numbers(2), {}, wait=True)
    with pytest.raises(CheckpointError, match=r"cannot be used: .*Read-only"):
        single([tier])
    make_writable(small_disk)
    checkpointer.save(3, numbers(3), {}, wait=True)
    assert holds(tier, 1)
    assert holds(tier, 3)


def test_s3_that_cannot_be_read_is_passed_over_for_an_older_step(
    tmp_path: Path, bucket: str, faults: FaultProxy, few_attempts: None
) -> None:
    slow, fast = TierFolder("s3", f"{bucket}/run"), TierFolder("shared", tmp_path)
    single([fast]).save(1, numbers(1), {}, wait=True)
    single([slow]).save(2, numbers(2), {}, wait=True)
    checkpointer = single([fast, slow])
    faults.fail("500", method="GET", holding="distcp")
    found = numbers(0)
    with pytest.warns(UserWarning, match="step 2 cannot be used"):
        assert checkpointer.restore(found) == {"step": 1}
    assert equal(found, numbers(1))
    faults.fail("500", method="GET")
    assert checkpointer.restore(found) == {"step": 1}
    assert checkpointer.restored is not None
    assert "tier s3 cannot be read" in checkpointer.restored.passed_over[0]
    with pytest.raises(CheckpointError, match="tier s3 cannot be read"):
        find_checkpoint([slow])


def test_whoever_reads_without_ranks_passes_over_what_cannot_be_listed_or_is_gone(
    tmp_path: Path, bucket: str, faults: FaultProxy, few_attempts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = TierFolder("s3", f"{bucket}/run"), TierFolder("shared", tmp_path)
    single([fast]).save(1, numbers(1), {}, wait=True)
    single([slow]).save(2, numbers(2), {}, wait=True)
    faults.fail("500", method="GET", holding="step-00000002")
    with pytest.warns(UserWarning, match="step 2 cannot be used: .* cannot be listed: .*500"):
        assert find_checkpoint([fast, slow]).step == 1
    monkeypatch.setattr(FolderTier, "open", lambda self, step: [])  # removed since it was found
    with pytest.raises(CheckpointError, match="step 1 cannot be used: it is gone"):
        find_checkpoint([fast])


def test_what_was_cut_off_in_s3_is_removed_only_by_the_run_that_owns_it(bucket: str, s3_server: S3Server) -> None:
    name = bucket.removeprefix("s3://")
    mine = TierFolder("s3", f"{bucket}/run", owner="mine")
    single([mine]).save(1, numbers(1), {}, wait=True)
    s3_server.replace(name, "run/step-00000002/__0_0_0.distcp", b"half")
    with pytest.raises(CheckpointError, match=r"another run of this name \(OWNER says mine, this run is other\)"):
        single([TierFolder("s3", f"{bucket}/run", owner="other")])
    assert "run/step-00000002/__0_0_0.distcp" in s3_server.objects(name)
    with pytest.warns(UserWarning, match="removed unfinished step-00000002"):
        checkpointer = single([mine])
    assert not [key for key in s3_server.objects(name) if "step-00000002" in key]
    assert checkpointer.restore(numbers(0)) == {"step": 1}


def test_clocks_do_not_order_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = TierFolder("nvme", tmp_path / "a", node="node-0"), TierFolder("shared", tmp_path / "b", keep=2)
    for step, clock in ((1, 3e9), (2, 2e9), (3, 1e9)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        single([fast, slow]).save(step, numbers(step), {}, wait=True)
        for file in tmp_path.rglob(f"step-{step:08d}/*"):
            os.utime(file, (clock, clock))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-00000002", "step-00000003"]
    shutil.rmtree(tmp_path / "a")
    assert single([fast, slow]).restore(numbers(0)) == {"step": 3}


def save_with_skewed_clocks(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Each rank is a node whose clock is a day ahead of the one before, and that jumps back between two saves."""
    rank, world = rank_and_world()
    tiers = [
        TierFolder("nvme", path / f"host-{rank}", every_seconds=60.0, keep=1, node=f"node-{rank}"),
        TierFolder("shared", path / "shared", every_seconds=60.0, keep=1),
    ]
    honest, found = time.time, numbers(0)
    for step in (1, 2):
        checkpointer = Checkpointer(tiers, rank, world)
        time.time = lambda step=step: honest() + 86_400.0 * (rank - 3 * step)  # type: ignore[misc]
        try:
            assert not checkpointer.due(step, 86_400.0 * rank)
            assert checkpointer.due(step, 86_400.0 * rank + 61.0 - 30.0 * rank), "rank 0 says when a minute is over"
            checkpointer.save(step, numbers(step), {})
            checkpointer.close()
        finally:
            time.time = honest
    again = Checkpointer(tiers, rank, world)
    counters = again.restore(found)
    again.close()
    assert equal(found, numbers(2))
    assert again.restored is not None
    return counters, again.restored.passed_over


def test_nodes_whose_clocks_differ_save_together_and_restore_the_newest_step(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(save_with_skewed_clocks, tmp_path, ranks=2) == [({"step": 2}, ())] * 2
    folders = ("host-0/node-0", "host-1/node-1", "shared")
    for folder in folders:
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["step-00000002"]


def test_retention_leaves_what_was_just_written(tmp_path: Path) -> None:
    tier = TierFolder("shared", tmp_path, keep=1)
    single([tier]).save(20, numbers(20), {}, wait=True)
    damaged = min((tmp_path / "step-00000020").glob("*.distcp"))
    damaged.write_bytes(b"")
    single([TierFolder("shared", tmp_path)]).save(9, numbers(9), {}, wait=True)
    checkpointer = single([tier])
    with pytest.warns(UserWarning, match="step 20"):
        checkpointer.restore(numbers(0))
    checkpointer.save(10, numbers(10), {}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
