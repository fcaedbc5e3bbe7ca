"""Checkpoints of ranks that share one GPU over NCCL: every tier, from layout to layout, and 2 GiB from S3.

A training is cut into parts. Each part has another layout and resumes from what the part before it saved. Weights and
optimizer state after a restore equal the saved ones to the bit. Losses are in fp32 and agree with those of one
undisturbed training to TOLERANCE: other layouts take sums in another order.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_s3 import FolderS3
from gang import Gang
from keepers import Keepers
from nodes import Nodes, nodes_of
from rehearsed import events, finish
from s3 import aws_variables
from test_every_layout import MODELS, Case
from tiny import make_trainer, tiny_job
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from craton.bench.recovery.rehearsal import Rehearsal, running
from craton.job import load_job
from craton.ml.training import Trainer
from craton.ml.training.build import tier_folders
from craton.ml.training.checkpoint import Checkpointer, TierFolder, find_checkpoint, read_tensors

TOLERANCE = 1e-4  # relative, of a loss
STEPS_EACH = 2  # of every part
PARTS: dict[str, dict[str, int]] = {
    "fsdp 4": {"fsdp": 4},
    "fsdp 2 · tp 2": {"fsdp": 2, "tp": 2},
    "pp 2 · fsdp 2": {"pp": 2, "fsdp": 2},
    "replicate 2 · fsdp 2": {"replicate": 2, "fsdp": 2},
    "one rank": {},
}
STEPS = STEPS_EACH * len(PARTS)
SAVED_ROWS, COLUMNS, TENSORS = 8192, 2048, 32  # of fp32: 64 MiB each, 2 GiB in all


class CrashError(Exception):
    """A rank that ends in the middle of a step."""


@dataclass
class Part:
    """What a rank saw in a part of the training."""

    losses: dict[int, float]  # of rank 0
    restored: tuple[int, str] | None  # step and tier, of rank 0
    found: dict[str, str]  # tensor → hash after the restore
    left: dict[str, str]  # the same at the end


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderS3]:
    server = FolderS3(tmp_path_factory.mktemp("s3"))
    server.make_bucket("checkpoints")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def undisturbed(nccl_gang: Gang) -> dict[int, float]:
    """The losses of a training on four ranks that nothing interrupts."""
    parts = nccl_gang.run(train_part, {"fsdp": 4}, STEPS, None, "", {}, None, ranks=4)
    assert sorted(parts[0].losses) == list(range(1, STEPS + 1))
    return parts[0].losses


def hashes(trainer: Trainer) -> dict[str, str]:
    """Tensor → hash of its bits, whole; of a pipeline those of this stage."""
    found = {}
    for name, tensor in trainer.saves.tensors().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data = whole.detach().contiguous().cpu().view(-1).view(torch.uint8)
        found[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    return found


def tiers_of(kind: str, place: str) -> list[TierFolder]:
    """A tier as a job names it: every rank is a node with a disk of its own (nvme), or all see the same place."""
    if kind == "nvme":
        rank = os.environ["RANK"]
        return [TierFolder("nvme", Path(place) / f"disk-{rank}", node=f"node-{rank}")]
    return [TierFolder(kind, place if kind == "object" else Path(place))]


def train_part(
    sizes: dict[str, int], until: int, kind: str | None, place: str, environment: dict[str, str], nodes: Nodes | None
) -> Part:
    """Train up to a step, and save; with `nodes`, in their memory, and end there as in a crash."""
    torch.cuda.set_device(0)
    os.environ.update(environment)
    trainer, records = make_trainer(
        tiny_job(STEPS),
        Case(sizes, "").layout,
        config=MODELS["dense"],
        steps=until if until < STEPS and nodes is None else None,
        device="cuda",
        peer=nodes.setup() if nodes is not None else None,
    )
    if kind is not None:
        world = int(os.environ["WORLD_SIZE"])
        trainer.parts.checkpointer = Checkpointer(tiers_of(kind, place), trainer.parts.ranks.rank, world)
    found: dict[str, str] = {}
    restore, load = trainer.saves.restore, trainer._load

    def restore_and_look(*arguments: Any, **options: Any) -> dict[str, Any] | None:
        counters = restore(*arguments, **options)
        found.update(hashes(trainer))
        return counters

    def load_or_crash() -> Any:
        if nodes is not None and trainer.step == until + 1:
            trainer.parts.checkpointer.wait()
            raise CrashError
        return load()

    trainer.saves.restore = restore_and_look  # type: ignore[method-assign]
    trainer._load = load_or_crash  # type: ignore[method-assign]
    try:
        trainer.fit()
    except CrashError:
        trainer._record_previous_step(None)  # a real rank records it when it leaves its generation
        left = hashes(trainer)
        assert trainer.parts.checkpointer.abandon(30.0)
    else:
        left = hashes(trainer)
        trainer.parts.checkpointer.close()
    restored = [(step, fields["tier"]) for name, step, fields in records.events if name == "restored"]
    return Part(records.losses, restored[-1] if restored else None, found, left)


def merged(parts: list[dict[str, str]]) -> dict[str, str]:
    """The hashes of all ranks: those of replicas are equal, stages of a pipeline have tensors of their own."""
    whole: dict[str, str] = {}
    for part in parts:
        for name, value in part.items():
            assert whole.setdefault(name, value) == value, f"ranks disagree on {name}"
    return whole


def check_part(parts: list[Part], before: dict[str, str], reached: int, tier: str, expected: dict[int, float]) -> None:
    first, steps = parts[0], range(reached + 1, reached + STEPS_EACH + 1)
    assert first.restored == ((reached, tier) if reached else None)
    if reached:
        assert merged([part.found for part in parts]) == before, "a bit has changed between save and restore"
    assert list(first.losses) == list(steps), "no step is done twice, none is left out"
    assert first.losses == pytest.approx({step: expected[step] for step in steps}, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["shared", "nvme", "object"])
def test_a_training_goes_on_from_this_tier_in_every_layout(
    nccl_gang: Gang, undisturbed: dict[int, float], s3: FolderS3, tmp_path: Path, kind: str
) -> None:
    place = "s3://checkpoints/training" if kind == "object" else str(tmp_path)
    environment = aws_variables(s3.url) if kind == "object" else {}
    before: dict[str, str] = {}
    for number, (name, sizes) in enumerate(PARTS.items()):
        if kind == "nvme" and name == "one rank":
            break  # the disk of one node does not hold the state of four
        ranks, reached = Case(sizes, "").layout.world, number * STEPS_EACH
        parts = nccl_gang.run(train_part, sizes, reached + STEPS_EACH, kind, place, environment, None, ranks=ranks)
        check_part(parts, before, reached, kind, undisturbed)
        before = merged([part.left for part in parts])


def test_a_training_goes_on_from_the_memory_of_its_nodes_in_every_layout(
    nccl_gang: Gang, undisturbed: dict[int, float], keepers: Keepers
) -> None:
    made = [keepers.start("node-0"), keepers.start("node-1")]
    before: dict[str, str] = {}
    for number, (name, sizes) in enumerate(PARTS.items()):
        ranks, reached = Case(sizes, "").layout.world, number * STEPS_EACH
        nodes = nodes_of(made[:1], 1, number + 1) if name == "one rank" else nodes_of(made, 2, number + 1)
        parts = nccl_gang.run(train_part, sizes, reached + STEPS_EACH, None, "", {}, nodes, ranks=ranks)
        check_part(parts, before, reached, "peer", undisturbed)
        before = merged([part.left for part in parts])


def large_state(layout: str) -> dict[str, Tensor]:
    """The same random numbers in any layout: whole tensors are made one at a time."""
    if layout == "fsdp 4":
        mesh, placements = init_device_mesh("cuda", (4,), mesh_dim_names=("fsdp",)), [Shard(0)]
    elif layout == "fsdp 2 · tp 2":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("fsdp", "tp"))
        placements = [Shard(0), Shard(1)]
    tensors: dict[str, Tensor] = {}
    for index in range(TENSORS):
        generator = torch.Generator("cuda").manual_seed(index)
        whole = torch.randn(SAVED_ROWS, COLUMNS, device="cuda", generator=generator)
        name = f"model.layer.{index}"
        tensors[name] = whole
        if layout != "one rank":
            tensors[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return tensors


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_large(place: str, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds that training would be blocked, and seconds until the objects are complete."""
    torch.cuda.set_device(0)
    os.environ.update(environment)
    tensors = large_state("fsdp 4")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpointer = Checkpointer([TierFolder("object", place, every_steps=1)], rank, world)
    checkpointer.reserve(tensors)
    torch.cuda.synchronize()
    began = time.perf_counter()
    blocked = checkpointer.save(1, tensors, {"samples": 1})
    checkpointer.wait()
    seconds = time.perf_counter() - began
    checkpointer.close()
    return blocked, seconds


def restore_large(place: str, environment: dict[str, str], layout: str) -> tuple[float, int, bool]:
    """Seconds of the restore, bytes of the checkpoint, and whether every number came back to this rank's GPU."""
    torch.cuda.set_device(0)
    os.environ.update(environment)
    expected = large_state(layout)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpointer = Checkpointer([TierFolder("object", place)], rank, world)
    torch.cuda.synchronize()
    began = time.perf_counter()
    assert checkpointer.restore(tensors) == {"samples": 1, "step": 1}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert checkpointer.restored is not None
    num_bytes = checkpointer.restored.bytes
    checkpointer.close()
    is_same = all(torch.equal(local(tensors[name]), local(expected[name])) for name in expected)
    return seconds, num_bytes, is_same and all(local(tensor).is_cuda for tensor in tensors.values())


def test_two_gigabytes_come_back_from_s3_to_another_layout(
    nccl_gang: Gang, s3: FolderS3, mps: bool, summary: Callable[[str], None]
) -> None:
    place, environment = "s3://checkpoints/large", aws_variables(s3.url)
    saved = nccl_gang.run(save_large, place, environment, ranks=4)
    blocked, seconds = (max(of_rank[index] for of_rank in saved) for index in range(2))
    num_bytes = SAVED_ROWS * COLUMNS * 4 * TENSORS
    summary(
        f"S3 on this machine, {num_bytes / 2**30:.1f} GiB, MPS {'on' if mps else 'off'}: 4 ranks save in "
        f"{seconds:.2f} s, {num_bytes / seconds / 1e9:.2f} GB/s; training is blocked for {blocked * 1e3:.0f} ms"
    )
    for layout, ranks in (("fsdp 2 · tp 2", 4), ("one rank", 1)):
        restored = nccl_gang.run(restore_large, place, environment, layout, ranks=ranks)
        assert all(is_same for _, _, is_same in restored)
        assert restored[0][1] >= num_bytes
        seconds = max(seconds for seconds, _, _ in restored)
        rate = num_bytes / seconds / 1e9
        summary(f"S3 on this machine: {layout} restores it to the GPU in {seconds:.2f} s, {rate:.2f} GB/s")


def test_a_run_writes_the_same_state_to_every_tier_of_its_job(
    s3: FolderS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: Callable[[str], None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):  # a run starts without our MPS
        monkeypatch.delenv(name, raising=False)
    for name, value in aws_variables(s3.url).items():
        monkeypatch.setenv(name, value)
    tiers = "{to: nvme, every_steps: 8}, {to: shared, every_steps: 8}, {to: 's3://checkpoints/runs', every_steps: 8}"
    job = Rehearsal(
        "tiers",
        nodes=4,
        ranks_per_node=1,
        shares_gpus=True,
        batch=12,
        steps=12,
        layout={"fsdp": 4, "micro_batch": 3},
        checkpoint=f"{{peer: 1 steps, tiers: [{tiers}]}}",
        environment=aws_variables(s3.url),
    )
    with running(tmp_path, job) as run:
        finish(run)
        saved = {(event["tier"], event["step"]): event["seconds"] for event in events(run, "checkpoint_saved")}
        folders = tier_folders(load_job(run.job_path), run)
        assert {(folder.name, step) for folder in folders for step in (8, 12)} <= saved.keys()
        states = []
        for folder in folders:
            found = find_checkpoint([folder])
            assert found.step == 12
            state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in found.shapes.items()}
            read_tensors(found, state)
            states.append(state)
        for folder, state in zip(folders[1:], states[1:], strict=True):
            assert state.keys() == states[0].keys()
            assert all(torch.equal(state[name], states[0][name]) for name in state), folder.name
    words = ", ".join(f"{tier} {seconds:.2f} s" for (tier, step), seconds in saved.items() if step == 8)
    summary(f"a run of 4 ranks saves in the background: {words}")
