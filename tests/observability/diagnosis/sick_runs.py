"""Snapshots with a victim: runs that died, hang, are slow, restarted or serve too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_snapshots import (
    MOMENT,
    healthy,
    hung,
    slowed,
    with_rank,
    with_ranks,
    with_run,
)

from craton.observability.diagnosis.latencies import MissedLimit, SnapshotLatencies
from craton.observability.diagnosis.snapshot import (
    Collectives,
    RankError,
    Restart,
    Serving,
    Snapshot,
    SnapshotRank,
    StuckCollective,
    TrainingFacts,
)
from craton.telemetry.node import ProcessResources

RANK, NODE, GPU = 11, "node-1", 3  # the victim, of eight ranks a node
TRAINING = TrainingFacts(
    objective="cross_entropy",
    vocabulary=128_256,
    has_files=True,
    learning_rate=3e-4,
    usual_learning_rate=3e-4,
    warmup_steps=100,
    policy="skip",
    is_new=True,
    tokens_per_expert=1e5,
)
FUNCTION = replace(TRAINING, source="mine.data:rows", has_files=False)


def dead(code: int = 1, **changes: object) -> Snapshot:
    """The victim died with this code, and the run with it."""
    run = with_rank(healthy(4), RANK, is_alive=False, exit_code=code, ended_at=MOMENT - 5.0, ended_in="productive")
    return with_run(run, state="failed", message=f"rank {RANK} on {NODE} ended with code {code}", **changes)


def slow_victim() -> Snapshot:
    return slowed(healthy(4), {RANK: 1.3})


def slow_node(phase: str = "compute") -> Snapshot:
    return slowed(healthy(4), dict.fromkeys(range(8, 16), 1.4), phase)


def restarted(*reasons: str, lost_seconds: float = 15.0) -> Snapshot:
    """It broke for these reasons, a minute apart, and came back each time; the last time a minute ago."""
    ages = [60.0 * (len(reasons) - number) for number in range(len(reasons))]
    breaks = tuple(
        Restart(MOMENT - age + 5.0, MOMENT - age, reason, lost_seconds)
        for age, reason in zip(ages, reasons, strict=True)
    )
    previous = MOMENT - 115.0 if len(reasons) > 1 else MOMENT - 9000.0
    return with_run(
        healthy(4),
        restarts=len(breaks),
        recent_restarts=breaks,
        generation=len(breaks),
        generation_began=MOMENT - 55.0,
        previous_began=previous,
    )


def serving(**changes: Any) -> Snapshot:
    """A server with more requests than it can compute."""
    run = with_run(healthy(1, 1), kind="serve")
    return replace(run, serving=replace(Serving(16, 44, 30, 0.7, 0, 2.5), **changes))


def latencies(seconds: float, name: str = "ttft", **parts: float) -> SnapshotLatencies:
    """Latencies of a server that misses a limit of 100 ms."""
    means = {part: {"mean": mean} for part, mean in {name: seconds, **parts}.items()}
    return SnapshotLatencies(200, means, (MissedLimit(name, "p95", 0.1, 1.5 * seconds),), {"ttft": 0.05})


def mute(rank: SnapshotRank) -> SnapshotRank:
    """A rank of a command that has printed its last step half a minute ago; only rank 0 is read."""
    idle = ProcessResources(cpus=96, node_cpus=96, idle_seconds=35.0)
    line = "batch 81: empty, skipped" if rank.rank == 1 else f"step 80 loss 0.08{rank.rank}"
    if rank.rank:
        return replace(rank, kind="start", step=0, progress_age_seconds=0.0, resources=idle, last_line=line)
    limits = {"patience_seconds": 900.0, "progress_limit_seconds": 900.0, "slowest_seconds": 0.2, "step_seconds": 0.1}
    return replace(rank, kind="productive", progress_age_seconds=29.0, resources=idle, last_line=line, **limits)


def stuck(missing: tuple[int, ...] = (), mismatch: str = "", mismatched: tuple[int, ...] = ()) -> Snapshot:
    members = tuple(range(32))
    one = StuckCollective("0", 77, "nccl:all_reduce", "default_pg", members, missing, (), mismatch, mismatched)
    return replace(hung(healthy(4)), collectives=Collectives(stuck=(one,), recorders_read=32))


def with_losses(change: Callable[[int, float], float]) -> Snapshot:
    run = healthy(4)
    loss = tuple((step, change(number - 180, value)) for number, (step, value) in enumerate(run.series.loss))
    return replace(run, series=replace(run.series, loss=loss))


def with_resources(snapshot: Snapshot, **own: Any) -> Snapshot:
    """All ranks may use all CPUs but the victim, which has these."""
    ranks = [
        replace(rank, resources=ProcessResources(**{"cpus": 96, "node_cpus": 96, **(own if rank.rank == RANK else {})}))
        for rank in snapshot.ranks
    ]
    return replace(snapshot, ranks=tuple(ranks))


def reported(kind: str, message: str, **changes: Any) -> Snapshot:
    """The victim died and said why."""
    values = {"user_frame": "/home/me/train.py:12 in step", "step": 5000, "phase": "productive", "code": 1, **changes}
    error = RankError(MOMENT - 5.0, node=NODE, rank=RANK, ranks=(RANK,), type=kind, message=message, **values)
    return replace(dead(values["code"] or 1), errors=(error,))


def unmeasured(snapshot: Snapshot) -> Snapshot:
    """The same run where no rank has told of a step."""
    return with_ranks(snapshot, lambda rank: replace(rank, recent={}, earlier={}, num_recent=0, num_earlier=0))
