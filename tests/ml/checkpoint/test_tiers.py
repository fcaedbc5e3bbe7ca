"""Every tier gives back what it was given, to any ranks in any layout: shared folders, nodes' own disks, S3."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from s3 import FaultProxy, S3Server, aws_variables
from states import (
    Files,
    equal,
    numbers,
    parallel_state,
    rank_and_world,
    single,
    state,
    tier_of,
    whole,
)
from torch import Tensor
from waiting import wait_until

from craton.ml.training.checkpoint import Checkpointer, CheckpointError, TierFolder, find_checkpoint, read_tensors
from craton.ml.training.checkpoint.folder_tier import FolderFiles
from craton.ml.training.checkpoint.objects import ObjectFiles
from craton.ml.training.checkpoint.read import SPAN_BYTES

KINDS = ("nvme", "shared", "s3")


def place_of(kind: str, tmp_path: Path, bucket: str) -> Path | str:
    return f"{bucket}/prefix/run" if kind == "s3" else tmp_path / kind


def save_on_ranks(kind: str, place: Path | str, step: int, environment: dict[str, str]) -> dict[str, Tensor]:
    os.environ.update(environment)
    rank, world = rank_and_world()
    tensors = state(step, world > 1)
    before = whole(tensors)
    checkpointer = Checkpointer([tier_of(kind, place, rank, keep=2)], rank, world)
    checkpointer.save(step, tensors, {"samples": step * 8})
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1)
    checkpointer.close()
    return before


def restore_on_ranks(
    kind: str, place: Path | str, hosts: list[int], environment: dict[str, str]
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """`hosts` are the machines that the ranks are on now."""
    os.environ.update(environment)
    rank, world = rank_and_world()
    tensors = state(12345, world > 1)
    checkpointer = Checkpointer([tier_of(kind, place, hosts[rank])], rank, world)
    counters = checkpointer.restore(tensors)
    checkpointer.close()
    return counters, whole(tensors)


@pytest.mark.parametrize(
    ("kind", "saved", "hosts"),
    [
        ("nvme", 2, [0, 1]),
        ("nvme", 2, [1, 0, 2, 3]),  # other ranks on the machines than before, and two machines that have nothing
        ("nvme", 1, [0, 1]),
        ("s3", 2, [0, 1, 2, 3]),
        ("s3", 4, [0, 1]),
        ("s3", 2, [0]),
    ],
)
def test_every_tier_gives_back_to_other_ranks(
    gang: Gang, tmp_path: Path, bucket: str, s3_server: S3Server, kind: str, saved: int, hosts: list[int]
) -> None:
    place, environment = place_of(kind, tmp_path, bucket), aws_variables(s3_server.url)
    expected = gang.run(save_on_ranks, kind, place, 200, environment, ranks=saved)[0]
    for counters, found in gang.run(restore_on_ranks, kind, place, hosts, environment, ranks=len(hosts)):
        assert counters == {"samples": 1600, "step": 200}
        assert equal(found, expected)


def test_a_nodes_disk_holds_its_own_shards_and_the_list_of_all(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_on_ranks, "nvme", tmp_path, 7, {}, ranks=2)
    folders = [tmp_path / f"host-{host}" / f"node-{host}" / "step-00000007" for host in (0, 1)]
    shards = [{file.name for file in folder.glob("*.distcp")} for folder in folders]
    assert all(shards)
    assert not shards[0] & shards[1]
    for folder in folders:
        listed = json.loads((folder / "checksums.json").read_text())["files"]
        assert set(listed) == shards[0] | shards[1] | {".metadata"}
        assert (folder / ".metadata").is_file()


def restore_from_two(place: Path, hosts: list[int]) -> tuple[dict[str, Any] | None, tuple[str, ...], str]:
    rank, world = rank_and_world()
    tiers = [tier_of("nvme", place, hosts[rank]), TierFolder("shared", place / "shared")]
    checkpointer = Checkpointer(tiers, rank, world)
    tensors = state(0, True)
    counters = checkpointer.restore(tensors)
    checkpointer.close()
    assert checkpointer.restored is not None
    assert float(tensors["optimizer.count"]) == checkpointer.restored.step
    return counters, checkpointer.restored.passed_over, checkpointer.restored.tier


def test_a_step_whose_node_is_gone_is_passed_over(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_on_ranks, "shared", tmp_path / "shared", 6, {}, ranks=2)
    gang.run(save_on_ranks, "nvme", tmp_path, 7, {}, ranks=2)
    for counters, passed_over, tier in gang.run(restore_from_two, tmp_path, [0, 5], ranks=2):
        assert (counters, tier) == ({"samples": 48, "step": 6}, "shared")
        (told,) = passed_over
        assert told.startswith("tier nvme: step 7 cannot be used: __1_0_0.distcp is not on any node")


def save_layout(place: Path, layout: str) -> None:
    rank, world = rank_and_world()
    checkpointer = Checkpointer([TierFolder("shared", place)], rank, world)
    checkpointer.save(5, parallel_state(5, layout), {}, wait=True)
    checkpointer.close()


def restore_layouts(place: Path, layouts: list[str]) -> list[bool]:
    rank, world = rank_and_world()
    answers = []
    expected = parallel_state(5, "one")
    for layout in layouts:
        tensors = parallel_state(99, layout)
        checkpointer = Checkpointer([TierFolder("shared", place)], rank, world)
        assert checkpointer.restore(tensors) == {"step": 5}
        checkpointer.close()
        found = whole(tensors)
        answers.append(all(torch.equal(found[name], expected[name]) for name in found))
    return answers


LAYOUTS = ["pp", "fsdp·tp", "fsdp over tp", "rows twice", "replicate·fsdp", "one"]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:3], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[3:])]
)
def test_meshes_of_several_dimensions_and_stages_reshard_to_each_other(gang: Gang, tmp_path: Path, layout: str) -> None:
    gang.run(save_layout, tmp_path, layout, ranks=4)
    assert gang.run(restore_layouts, tmp_path, LAYOUTS, ranks=4) == [[True] * len(LAYOUTS)] * 4
    payload = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    pieces = 4 * {"pp": 2, "fsdp·tp": 4, "fsdp over tp": 4, "rows twice": 4, "replicate·fsdp": 2, "one": 1}[layout]
    assert payload < 4 * 13 * 6 * 4 + pieces * 2048, "a copy was written more than once"


@pytest.mark.parametrize("kind", ["shared", "s3"])
def test_a_large_file_is_read_once_and_every_block_of_it_checked(
    tmp_path: Path, bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = f"{bucket}/run" if kind == "s3" else tmp_path
    tier = TierFolder(kind, place)
    expected = {f"model.{size}": torch.rand(size) for size in (5_000_000, 6, 700, 4_000_000)}  # three spans
    single([tier]).save(1, expected, {}, wait=True)
    reads: list[tuple[int, int]] = []
    files = {"shared": FolderFiles, "s3": ObjectFiles}[kind]
    read = files.read

    def noted(self: Any, name: str, begin: int = 0, end: int | None = None) -> Any:
        if name.endswith(".distcp") and end is not None:
            reads.append((begin, end))
        return read(self, name, begin, end)

    monkeypatch.setattr(files, "read", noted)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert single([tier]).restore(found) == {"step": 1}
    assert equal(found, expected)
    assert [begin for begin, _ in sorted(reads)] == [0, SPAN_BYTES, 2 * SPAN_BYTES]
    harmed = Files(tier, 1, s3_server)
    (name,) = [name for name in harmed.names if name.endswith(".distcp")]
    bad = bytearray(harmed.read(name))
    bad[SPAN_BYTES + 12_345] ^= 1
    harmed.write(name, bytes(bad))
    with (
        pytest.warns(UserWarning, match="does not match its checksum"),
        pytest.raises(CheckpointError, match="16,777,216 to 25,"),
    ):
        single([tier]).restore(found)


def test_all_tiers_are_fed_from_one_copy(tmp_path: Path, bucket: str) -> None:
    tiers = [tier_of(kind, place_of(kind, tmp_path, bucket), 0) for kind in KINDS]
    checkpointer, tensors = single(tiers), numbers(3)
    checkpointer.save(3, tensors, {"samples": 24})
    for tensor in tensors.values():
        tensor.zero_()
    checkpointer.wait()
    assert len(checkpointer._staging._idle) == 1
    checkpointer.close()
    for tier in tiers:
        found = numbers(0)
        assert single([tier]).restore(found) == {"samples": 24, "step": 3}
        assert equal(found, numbers(3)), tier.name
        alone = numbers(0)
        read_tensors(find_checkpoint([tier]), alone)
        assert equal(alone, numbers(3)), tier.name


def test_a_slow_tier_holds_up_neither_a_step_nor_a_faster_tier(tmp_path: Path, bucket: str, faults: FaultProxy) -> None:
    place = f"{bucket}/run"
    tiers = [TierFolder("nvme", tmp_path, every_steps=1, keep=9), TierFolder("s3", place, every_steps=1)]
    checkpointer = single(tiers)
    slow = faults.fail("slow", method="PUT", holding="distcp", seconds=86400)
    for step in range(1, 6):
        assert checkpointer.due(step)
        checkpointer.save(step, numbers(step), {})
        wait_until(lambda: checkpointer._lanes["nvme"].outstanding == 0)
    slow.times = 0
    slow.over.set()
    checkpointer.wait()
    outcomes = {(report.tier, report.step): report for report in checkpointer.reports()}
    assert [outcomes["nvme", step].outcome for step in range(1, 6)] == ["saved"] * 5
    assert [outcomes["s3", step].outcome for step in range(1, 6)] == ["saved"] * 2 + ["skipped"] * 3
    assert outcomes["s3", 4].error == "earlier saves are still being written"
    assert checkpointer.due(6)
    checkpointer.save(6, numbers(6), {}, wait=True)
    for step in (1, 2, 6):
        found = numbers(0)
        read_tensors(find_checkpoint([tiers[1]], step), found)
        assert equal(found, numbers(step)), "a copy was overwritten while it was written from"
