"""Checkpoints survive what happens to them: other numbers of ranks, torn files, full disks, kill -9 in the middle."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from states import equal, numbers, rank_and_world, single, state, wait_for_report, whole
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.tensor import DTensor
from waiting import PATIENCE_SECONDS

from craton.errors import CratonError
from craton.ml.training.checkpoint import Checkpointer, CheckpointError, TierFolder
from craton.ml.training.checkpoint.checksums import DifferentModelError


def save_on_ranks(path: Path, step: int, sharded: bool) -> tuple[dict[str, Tensor], float]:
    """Saves in the background and changes the weights meanwhile, as training would."""
    tensors = state(step, sharded)
    checkpointer = Checkpointer([TierFolder("shared", path, keep=2)], *rank_and_world())
    checkpointer.save(step - 1, state(step - 1, sharded), {"samples": (step - 1) * 8})
    before = whole(tensors)
    blocked = checkpointer.save(step, tensors, {"samples": step * 8})
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1)
    checkpointer.close()
    return before, blocked


def restore_on_ranks(path: Path, sharded: bool) -> tuple[dict[str, Any] | None, dict[str, Tensor], tuple[str, ...]]:
    tensors = state(12345, sharded)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    checkpointer = Checkpointer([TierFolder("shared", path)], *rank_and_world())
    counters = checkpointer.restore(tensors)
    assert all(tensors[name].data_ptr() == address for name, address in addresses.items())
    report = checkpointer.restored
    checkpointer.close()
    return counters, whole(tensors), report.passed_over if report else ()


def test_threads_that_read_record_no_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two parts of one parameter that arrive together are views changed in place, which autograd refuses."""
    checkpointer = single([TierFolder("shared", tmp_path)])
    checkpointer.save(1, numbers(1), {}, wait=True)
    resolve, recorded = DefaultLoadPlanner.resolve_tensor, []

    def resolve_tensor(planner: DefaultLoadPlanner, item: Any) -> Tensor:
        recorded.append(torch.is_grad_enabled())
        return resolve(planner, item)

    monkeypatch.setattr(DefaultLoadPlanner, "resolve_tensor", resolve_tensor)
    assert checkpointer.restore(numbers(2)) is not None
    assert recorded == [False, False]
    checkpointer.close()


@pytest.mark.parametrize(
    ("saved", "restored"), [(2, 4), (4, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (1, 2)))]
)
def test_any_number_of_ranks_takes_a_checkpoint_back(gang: Gang, tmp_path: Path, saved: int, restored: int) -> None:
    expected, _ = gang.run(save_on_ranks, tmp_path, 200, saved > 1, ranks=saved)[0]
    for counters, found, passed_over in gang.run(restore_on_ranks, tmp_path, restored > 1, ranks=restored):
        assert counters == {"samples": 1600, "step": 200}
        assert not passed_over
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000199", "step-00000200"]


def test_replicas_write_each_tensor_once(gang: Gang, tmp_path: Path) -> None:
    expected, _ = gang.run(save_on_ranks, tmp_path / "two", 3, False, ranks=2)[0]
    gang.run(save_on_ranks, tmp_path / "one", 3, False, ranks=1)
    shards = sum(file.stat().st_size for file in (tmp_path / "two").rglob("*.distcp"))
    assert shards == sum(file.stat().st_size for file in (tmp_path / "one").rglob("*.distcp"))
    counters, found, _ = gang.run(restore_on_ranks, tmp_path / "two", True, ranks=2)[0]
    assert counters is not None
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def restore_with_damage(path: Path) -> tuple[dict[str, Any] | None, float, list[str], tuple[str, ...]]:
    tensors = state(0, True)
    checkpointer = Checkpointer([TierFolder("shared", path)], *rank_and_world())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counters = checkpointer.restore(tensors)
    checkpointer.close()
    assert checkpointer.restored is not None
    told = [str(warning.message) for warning in caught if "cannot be used" in str(warning.message)]
    return counters, float(tensors["optimizer.count"]), told, checkpointer.restored.passed_over


def test_ranks_agree_to_pass_over_a_shard_that_one_of_them_finds_changed(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_on_ranks, tmp_path, 20, True, ranks=2)
    shard = sorted((tmp_path / "step-00000020").glob("*.distcp"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    answers = gang.run(restore_with_damage, tmp_path, ranks=2)
    for counters, count, _, passed_over in answers:
        assert counters == {"samples": 152, "step": 19}
        assert count == 19
        (told,) = passed_over
        assert told.startswith(f"tier shared: step 20 cannot be used: {shard.name} does not match its checksum")
    assert [len(told) for _, _, told, _ in answers] == [1, 0]  # rank 0 speaks for all


def tear(folder: Path) -> None:
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-7])


def lose(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def unfinish(folder: Path) -> None:
    (folder / "COMPLETE").unlink()


def garble(folder: Path) -> None:
    (folder / "checksums.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (tear, "bytes instead of"),
        (lose, "is missing"),
        (unfinish, "COMPLETE is missing, so the step was never finished"),
        (garble, "checksums.json cannot be used"),
    ],
)
def test_a_bad_checkpoint_is_passed_over_out_loud(tmp_path: Path, harm: Any, said: str) -> None:
    fast, slow = TierFolder("nvme", tmp_path / "nvme"), TierFolder("shared", tmp_path / "shared")
    single([fast, slow]).save(1, numbers(1), {"samples": 8}, wait=True)
    single([fast]).save(2, numbers(2), {"samples": 16}, wait=True)
    harm(tmp_path / "nvme" / "step-00000002")
    harm(tmp_path / "nvme" / "step-00000001")
    tensors, checkpointer = numbers(0), single([fast, slow])
    with pytest.warns(UserWarning, match=said):
        counters = checkpointer.restore(tensors)
    assert counters == {"samples": 8, "step": 1}
    assert checkpointer.restored is not None
    assert checkpointer.restored.tier == "shared"
    assert len(checkpointer.restored.passed_over) == 2
    assert all(torch.equal(tensors[name], value) for name, value in numbers(1).items())


def test_when_every_checkpoint_is_bad_nothing_starts_from_scratch(tmp_path: Path) -> None:
    tier = TierFolder("shared", tmp_path)
    assert single([tier]).restore(numbers(0)) is None
    single([tier]).save(1, numbers(1), {}, wait=True)
    tear(tmp_path / "step-00000001")
    with pytest.warns(UserWarning, match="step 1"), pytest.raises(CheckpointError, match="remove these folders"):
        single([tier]).restore(numbers(0))


def test_another_model_is_an_error_and_not_a_fallback(tmp_path: Path) -> None:
    tier = TierFolder("shared", tmp_path)
    single([tier]).save(1, numbers(1), {}, wait=True)
    other = {"model.a": torch.zeros(64, 31), "model.b": torch.zeros(1)}
    with pytest.raises(DifferentModelError) as caught:
        single([tier]).restore(other)
    text = str(caught.value)
    assert "model.a is [64, 31] here and [64, 32] in the checkpoint" in text
    assert "model.b is not in the checkpoint" in text
    assert "optimizer.exp_avg.a is only in the checkpoint" in text
    assert isinstance(caught.value, CratonError)


def test_the_newest_are_kept_and_damaged_ones_are_left_for_inspection(tmp_path: Path) -> None:
    checkpointer = single([TierFolder("shared", tmp_path, every_steps=1, keep=2)])
    for step in (1, 2, 3, 4):
        checkpointer.save(step, numbers(step), {})
        checkpointer.wait()
        if step == 1:
            unfinish(tmp_path / "step-00000001")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000003", "step-00000004"]
    assert [(report.step, report.error) for report in checkpointer.reports()] == [(step, None) for step in (1, 2, 3, 4)]
    assert checkpointer.reports() == []


def test_each_tier_is_written_when_it_is_due_and_all_at_a_stop(tmp_path: Path) -> None:
    fast = TierFolder("nvme", tmp_path / "nvme", every_steps=2)
    slow = TierFolder("shared", tmp_path / "shared", every_seconds=60.0)
    checkpointer = single([fast, slow])
    saved = []
    for step, now in ((1, 0.0), (2, 30.0), (3, 59.0), (4, 61.0), (5, 100.0), (6, 101.0)):
        if checkpointer.due(step, now):
            checkpointer.save(step, numbers(step), {})
            checkpointer.wait()
            saved.append(step)
    assert saved == [2, 4, 6]
    checkpointer.save(6, numbers(6), {}, wait=True)  # a stop: what has this step already is not written twice
    ended = sorted((report.step, report.tier) for report in checkpointer.reports())
    assert ended == [(2, "nvme"), (4, "nvme"), (4, "shared"), (6, "nvme"), (6, "shared")]


def test_a_step_that_is_reached_again_after_a_rollback_is_written_again(tmp_path: Path) -> None:
    checkpointer = single([TierFolder("shared", tmp_path)])
    checkpointer.save(1, numbers(1), {}, wait=True)
    checkpointer.save(2, numbers(2), {}, wait=True)
    shutil.rmtree(tmp_path / "step-00000002")
    checkpointer.restore(numbers(0))
    checkpointer.save(2, numbers(7), {}, wait=True)
    checkpointer.restore(numbers(0))
    checkpointer.save(1, numbers(5), {}, wait=True)  # there already, but not of this course
    shutil.rmtree(tmp_path / "step-00000002")
    tensors = numbers(0)
    assert single([TierFolder("shared", tmp_path)]).restore(tensors) == {"step": 1}
    assert torch.equal(tensors["model.a"], numbers(5)["model.a"])


SAVE_THEN_HANG = """
import os, signal, sys, threading, torch
from pathlib import Path
from craton.ml.training.checkpoint import Checkpointer, CheckpointError, TierFolder
from craton.ml.training.checkpoint.checksums import DifferentModelError
from craton.ml.training.checkpoint.lane import SaveReport

checkpointer = Checkpointer([TierFolder("shared", Path(sys.argv[1]))], 0, 1)
checkpointer.save(1, {"model.a": torch.ones(64, 32), "optimizer.exp_avg.a": torch.ones(64, 32)}, {}, wait=True)

def never_done(descriptor):
    os.write(1, b"in the middle\\n")  # not print: two threads would mix their lines
    threading.Event().wait()

os.fsync = never_done
checkpointer.save(2, {"model.a": torch.ones(64, 32), "optimizer.exp_avg.a": torch.ones(64, 32)}, {})
os.write(1, b"training goes on\\n")
signal.pause()
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_costs_that_save_only(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVE_THEN_HANG, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert {process.stdout.readline().strip() for _ in range(2)} == {"in the middle", "training goes on"}
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    process.stdout.close()
    assert (tmp_path / "step-00000002.partial").is_dir()
    with pytest.warns(UserWarning, match=r"removed unfinished step-00000002\.partial"):
        checkpointer = single([TierFolder("shared", tmp_path)])
    tensors = numbers(0)
    assert checkpointer.restore(tensors) == {"step": 1}
    assert float(tensors["model.a"].sum()) == 64 * 32
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_room_is_looked_for_before_the_save(small_disk: Path) -> None:
    checkpointer = single([TierFolder("shared", small_disk)])
    checkpointer.save(1, numbers(1), {}, wait=True)
    large = {"model.a": torch.zeros(300_000), "optimizer.exp_avg.a": torch.zeros(8)}
    checkpointer.save(2, large, {})  # fails in the background: training is not stopped
    failed = wait_for_report(checkpointer, 2)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(3, numbers(3), {})
    text = str(caught.value)
    assert text == failed.error
    begin = f"step 2 was not saved: tier shared ({small_disk}) is full: the save needs 1.21 MB, "
    assert text.startswith(begin)
    assert " are free; free space there, keep fewer checkpoints or use another folder; " in text
    assert text.endswith("; the checkpoint of step 1 is intact")
    checkpointer.wait()  # the save whose call told of it went on
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["step-00000001", "step-00000003"]
    assert [report.outcome for report in checkpointer.reports()] == ["saved"]
    checkpointer.save(4, large, {})
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(4, large, {}, wait=True)
    assert str(caught.value).count("step 4 was not saved") == 1, "two attempts that fail the same way are told once"


def fill_the_disk_in_the_middle(path: Path) -> tuple[str, list[str], dict[str, Any] | None]:
    """The room that there was before the save is gone when it comes to writing."""
    rank, world = rank_and_world()
    checkpointer = Checkpointer([TierFolder("shared", path)], rank, world)
    tensors = state(1, True, width=3000)
    checkpointer.save(1, tensors, {}, wait=True)
    usage, shutil.disk_usage = shutil.disk_usage, lambda path: usage(path)._replace(free=2**30)  # type: ignore[assignment]
    if rank == 0:
        (path / "other").write_bytes(bytes(usage(path).free - 100_000))
    try:
        checkpointer.save(2, tensors, {}, wait=True)
    except CheckpointError as error:
        text = str(error)
    else:
        text = "saved"
    finally:
        shutil.disk_usage = usage
    torch.distributed.barrier()
    left = sorted(entry.name for entry in path.iterdir())
    torch.distributed.barrier()
    (path / "other").unlink(missing_ok=True)
    torch.distributed.barrier()
    checkpointer.save(3, tensors, {}, wait=True)
    counters = checkpointer.restore(tensors)
    checkpointer.close()
    return text, left, counters


def test_a_disk_that_fills_up_in_the_middle_leaves_the_older_checkpoint(gang: Gang, small_disk: Path) -> None:
    answers = gang.run(fill_the_disk_in_the_middle, small_disk, ranks=2)
    for text, left, counters in answers:
        assert text == answers[0][0]
        assert f"tier shared ({small_disk}) became full during the save, which needs" in text
        assert "keep fewer checkpoints" in text
        assert "the checkpoint of step 1 is intact" in text
        assert left == ["other", "step-00000001"]
        assert counters == {"step": 3}


def due_on_ranks(path: Path) -> list[bool]:
    rank, world = rank_and_world()
    checkpointer = Checkpointer([TierFolder("shared", path, every_seconds=10.0)], rank, world)
    answers = [checkpointer.due(step, 6.0 * step + rank * 5.0 * (step == 1)) for step in range(5)]
    checkpointer.close()
    return answers


def test_all_ranks_follow_one_clock(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(due_on_ranks, tmp_path, ranks=2) == [[False, False, True, False, True]] * 2


def test_several_files_at_a_time_and_bytes_that_are_summed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own sums would cost a third of the throughput; outside of checkpoints they stay."""
    monkeypatch.setattr("craton.ml.training.checkpoint.checkpointer.file_threads", lambda: 3)
    expected = {f"model.{index}": torch.full((1000 + index,), float(index)) for index in range(3)}
    checkpointer = single([TierFolder("shared", tmp_path)])
    checkpointer.save(1, expected, {}, wait=True)
    shards = list((tmp_path / "step-00000001").glob("*.distcp"))
    assert len(shards) == 3
    for shard in shards:
        assert zipfile.ZipFile(shard).testzip() is not None, "the archive has sums of its own"
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert checkpointer.restore(found) == {"step": 1}
    assert equal(found, expected)
    torch.save(torch.ones(1000), tmp_path / "other")
    assert zipfile.ZipFile(tmp_path / "other").testzip() is None


def test_a_finished_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    checkpointer = single([TierFolder("shared", tmp_path)])
    blocked = checkpointer.save(7, numbers(7), {"samples": 56, "tokens": 10**12})
    assert 0 <= blocked < 5
    checkpointer.close()
    about = json.loads((tmp_path / "step-00000007" / "COMPLETE").read_text())
    assert (about["step"], about["world"], about["counters"]) == (7, 1, {"samples": 56, "tokens": 10**12})
    assert abs(time.time() - about["time"]) < 60
    files = json.loads((tmp_path / "step-00000007" / "checksums.json").read_text())["files"]
    assert set(files) == {file.name for file in (tmp_path / "step-00000007").iterdir()} - {"COMPLETE", "checksums.json"}
