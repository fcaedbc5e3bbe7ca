"""Recovery of ranks that share one GPU and communicate over NCCL: whatever breaks, training ends where a calm run ends.

Real agents, keepers and ranks. Ranks take turns on the GPU (no MPS: after a kill, its other clients stay slow). The
summary has, for every fault, the time until it was noticed and until the next step was done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import Gang
from rehearsed import events, finish, losses, shrunk_and_grown

from craton.bench.recovery.rehearsal import Rehearsal, running
from craton.ml.training.orders import abort_groups
from craton.telemetry import RunDirectory

STEPS = 32
GENERATIONS = 20
RANKS: dict[str, Any] = {"nodes": 4, "ranks_per_node": 1, "shares_gpus": True, "batch": 12}
FSDP = {"layout": {"fsdp": 4, "micro_batch": 3}}
HSDP = {"layout": {"replicate": 2, "fsdp": 2, "micro_batch": 3}}
SAME = 1e-5  # of a loss; NCCL may sum in another order in another generation


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@cache
def calm_losses(root: Path) -> dict[int, float]:
    with running(root, Rehearsal("calm", steps=STEPS, **RANKS, **FSDP)) as run:
        finish(run)
        return losses(run)


def expect_the_same(run: RunDirectory, expected: dict[int, float]) -> None:
    found = losses(run)
    assert sorted(found) == sorted(expected)
    different = {step: (loss, expected[step]) for step, loss in found.items() if abs(loss / expected[step] - 1) > SAME}
    assert not different, f"step → (loss, that of the calm run): {different}"


def report_faults(run: RunDirectory, summary: Callable[[str], None]) -> None:
    """Add a line per recovery to the summary: the faults before it, when they were noticed and when a step was done."""
    fired = events(run, "chaos_fired")
    begun = [event for event in events(run, "generation_started") if event["generation"]]
    for recovered in events(run, "recovered"):
        last = [event for event in begun if event["time"] <= recovered["time"]]
        begun = begun[len(last) :]
        before = [event for event in fired if event["time"] <= recovered["time"]]
        fired = fired[len(before) :]
        if before and last:
            faults = " and ".join(dict.fromkeys(str(event["fault"]) for event in before))
            noticed = last[0]["time"] - before[0]["time"]
            done = recovered["time"] - before[-1]["time"]
            where = f"{recovered['lost_steps']} lost, from {recovered['restored_from']}"
            summary(f"{run.name}: {faults}: noticed {noticed:.2f} s, next step {done:.2f} s after it; {where}")


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        pytest.param(
            "broken",
            ["kill rank=2@step=6", "hang rank=1@step=12,how=stop", "fail rank=3@step=19", "kill rank=0@step=26"],
            id="killed, stopped, raised, first",
        ),
        pytest.param(
            "twice",
            [
                "kill rank=1@step=6",
                "kill rank=3@step=6",
                "kill rank=2@during=staging,step=12",
                "kill rank=1@step=19",
                "kill rank=2@during=regroup,step=19",
                "kill rank=0@step=26",
                "kill rank=3@during=restore,step=26",
            ],
            id="two at once, and in the handling of the fault before",
        ),
    ],
)
def test_a_broken_run_ends_like_a_calm_one(
    runs: Path, summary: Callable[[str], None], name: str, faults: list[str]
) -> None:
    expected = calm_losses(runs)
    with running(runs, Rehearsal(name, steps=STEPS, chaos=faults, **RANKS, **FSDP)) as run:
        finish(run)
        report_faults(run, summary)
        expect_the_same(run, expected)
        assert len(events(run, "recovered")) >= 4
        assert all(event["restored_from"] == "peer" for event in events(run, "recovered"))


def test_a_lost_node_is_replaced_from_its_replica(runs: Path, summary: Callable[[str], None]) -> None:
    expected = calm_losses(runs)
    lost = Rehearsal(
        "replica", steps=STEPS, chaos=["kill rank=1@step=8", "lose-node node-3@step=20"], spares=1, **RANKS, **HSDP
    )
    with running(runs, lost) as run:
        finish(run)
        report_faults(run, summary)
        found = losses(run)
        assert found[STEPS] == pytest.approx(expected[STEPS], rel=1e-3), "another layout sums in another order"
        assert "node-4" in events(run, "generation_started")[-1]["nodes"]
        assert [event["restored_from"] for event in events(run, "recovered")] == ["peer", "peer"]


def test_a_run_goes_on_with_three_nodes_and_grows_again(runs: Path, summary: Callable[[str], None]) -> None:
    steps = 200  # enough for a node to come back before the end
    alone = {**RANKS, "nodes": 1, "layout": {"micro_batch": 12}}  # faster than ranks that take turns
    with running(runs, Rehearsal("alone", steps=steps, **alone)) as run:
        finish(run)
        expected = losses(run)
    elastic = Rehearsal(
        "elastic",
        steps=steps,
        chaos=["lose-node node-2@step=8"],
        min_nodes=3,
        layouts={3: {"fsdp": 3, "micro_batch": 4}},
        recover="{spare_wait: 1s}",
        **RANKS,
        **FSDP,
    )
    with shrunk_and_grown(runs, elastic, lost=2, fewer=3) as run:
        report_faults(run, summary)
        assert events(run, "generation_started")[-1]["world"] == 4
        assert losses(run)[steps] == pytest.approx(expected[steps], rel=1e-2), "other layouts sum in another order"


def _used_bytes_by_generation(folder: Path, generations: int) -> list[int]:
    """In each rank: abort communicators while the others wait in a collective for the last rank, and create them
    again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    used = []
    for generation in range(generations):
        if generation:
            store = dist.FileStore(str(folder / str(generation)), world)
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)
        groups = [dist.group.WORLD, dist.new_group(list(range(world)))]
        for group in groups:
            dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group)
        torch.cuda.synchronize()
        dist.barrier(groups[0])
        if rank < world - 1:
            for group in groups:
                dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group)
        abort_groups()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    return used


def test_communicators_of_twenty_generations_leave_no_memory(tmp_path: Path, summary: Callable[[str], None]) -> None:
    gang = Gang(4, is_on_gpu=True)
    try:
        used = gang.run(_used_bytes_by_generation, tmp_path, GENERATIONS, ranks=4)[0]
    finally:
        gang.close()
    summary(f"GPU memory in use after 2 and {GENERATIONS} generations: {used[1] >> 20} and {used[-1] >> 20} MiB")
    assert used[-1] - used[1] < 64 << 20, [size >> 20 for size in used]
