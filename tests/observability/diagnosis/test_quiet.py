"""Runs that do well, or are merely busy, are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_snapshots import (
    MOMENT,
    healthy,
    slowed,
    slowed_all,
    with_gpu,
    with_host,
    with_nodes,
    with_rank,
    with_ranks,
    with_run,
    with_tier,
    without_hardware,
)
from sick_runs import with_losses

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotXid


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("jitter", [0.005, 0.02, 0.03])
def test_healthy_runs_of_any_size(ranks_per_node: int, jitter: float) -> None:
    for seed in range(40):
        verdict = diagnose(healthy(1 + seed % 6, ranks_per_node, seed=seed, jitter=jitter))
        assert (verdict.condition, verdict.cause) == ("healthy", ""), (seed, verdict.sentence)


def busy_runs() -> Iterator[tuple[str, Snapshot]]:
    run = healthy(4)
    yield "knows nothing of its nodes", without_hardware(run)
    yield "first steps", with_ranks(slowed(run, {3: 3.0}), lambda rank: replace(rank, num_recent=3, earlier={}))
    yield (
        "saves for minutes",
        with_ranks(run, lambda rank: replace(rank, kind="checkpoint", progress_age_seconds=400.0)),
    )
    saving = with_ranks(run, lambda rank: replace(rank, progress_age_seconds=299.5))
    yield "rank 0 saves, the others wait", with_rank(saving, 0, kind="checkpoint", progress_age_seconds=300.0)
    yield "evaluates", with_ranks(run, lambda rank: replace(rank, kind="evaluate", progress_age_seconds=600.0))
    compiling = with_ranks(
        run, lambda rank: replace(rank, kind="compile", progress_age_seconds=700.0, step_seconds=None)
    )
    yield "compiles", with_run(compiling, state="starting")
    yield "a slow step", with_ranks(run, lambda rank: replace(rank, progress_age_seconds=8.0))
    yield "one bad step that was skipped", with_losses(lambda p, value: float("nan") if p == 19 else value)
    yield "a loss that spiked and came back", with_losses(lambda p, value: value * 4 if p == 15 else value)
    falling = with_losses(lambda p, value: value + (8.0 if p < -150 else 0.0))
    yield "a young loss", falling
    yield "power cap under load", with_gpu(run, "node-1", throttle=("sw_power_cap",))
    yield "idle cards clock down", with_gpu(run, "node-1", 3, sm_clock_mhz=345.0, utilisation=0.0)
    yield (
        "an old error",
        with_gpu(run, "node-1", 3, xids=(SnapshotXid(79, MOMENT - 9e4), SnapshotXid(63, MOMENT - 9e4))),
    )
    yield "a program's error long ago", with_gpu(run, "node-1", 3, xids=(SnapshotXid(31, MOMENT - 9e4),))
    yield "busy processors", with_host(run, processor_pressure=0.3, load=150.0)
    yield "one failed save", with_tier(run, "shared", failures=1)
    yield "one slow save", with_tier(run, "shared", last_seconds=60.0)
    yield "a little slower than it was", slowed_all(run, 1.06, "compute")
    crowded = healthy(1, 2, on="local", is_accelerated=False, jitter=0.08)
    yield "a crowded laptop", with_host(slowed(crowded, {1: 1.15}), processor_pressure=0.9, load=14.0, processors=2)
    late = healthy(1, 2, on="local", is_accelerated=False)
    yield "slower than this machine's plan", with_run(slowed_all(late, 1.9, "compute", since_start=True))
    yield "one node on sockets", with_nodes(healthy(1), lambda node: replace(node, nccl_network="Socket"))
    ended = with_ranks(run, lambda rank: replace(rank, kind="idle", progress_age_seconds=5000.0))
    yield "ranks that have ended well", with_run(ended, state="stopping")


BUSY = list(busy_runs())


@pytest.mark.parametrize(("name", "snapshot"), BUSY, ids=[name for name, _ in BUSY])
def test_busy_runs(name: str, snapshot: Snapshot) -> None:
    verdict = diagnose(snapshot)
    assert verdict.condition in ("healthy", "starting"), verdict.sentence
    assert verdict.cause == "", verdict.sentence
    assert not verdict.is_alarm


def test_runs_that_came_back_say_from_what() -> None:
    from craton.observability.diagnosis.snapshot import Event

    told = Event("generation_started", MOMENT - 500.0, text="rank 1 on node-1 was killed by SIGKILL")
    verdict = diagnose(with_run(replace(healthy(2), events=(told,)), restarts=1))
    assert verdict.condition == "healthy"
    assert "It restarted once: rank 1 on node-1 was killed by SIGKILL." in verdict.sentence


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_runs_that_have_ended(state: str) -> None:
    verdict = diagnose(with_run(healthy(2), state=state, message="craton stop"))
    assert (verdict.condition, verdict.cause) == (state, "")
