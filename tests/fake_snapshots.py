"""Snapshots of made-up runs: a healthy one of any size, and what makes it sick.

A healthy snapshot has everything known and everything well, with the jitter that real runs have; each function here
returns a changed copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from craton.observability.diagnosis.snapshot import (
    Collectives,
    Communicator,
    LogMatch,
    NodeWord,
    RunFacts,
    SchedulerState,
    Series,
    Snapshot,
    SnapshotFabricDevice,
    SnapshotGpu,
    SnapshotHost,
    SnapshotMount,
    SnapshotNode,
    SnapshotRank,
    SnapshotTier,
)

MOMENT = 1_800_000_000.0
USUAL_PHASES = {"data": 0.01, "compute": 0.80, "communication": 0.15, "optimizer": 0.03, "checkpoint": 0.01}
NUM_RECENT, NUM_EARLIER = 20, 100


def healthy(
    num_nodes: int = 2,
    ranks_per_node: int = 8,
    *,
    seed: int = 0,
    jitter: float = 0.01,
    step: int = 5000,
    phases: Mapping[str, float] | None = None,
    nodes_per_leaf: int = 4,
    layout: Mapping[str, int] | None = None,
    on: str = "slurm",
    is_accelerated: bool = True,
    dollars_per_hour: float | None = None,
    name: str = "llama-8b",
) -> Snapshot:
    """A run that does well: all ranks alive in lock-step, GPUs, fabric, storage and hosts known and in order."""
    dice = random.Random(seed)
    seconds = dict(phases or USUAL_PHASES)
    step_seconds = sum(seconds.values())
    names = tuple(f"node-{number}" for number in range(num_nodes))
    leaves = {node: f"leaf-{number // nodes_per_leaf}" for number, node in enumerate(names)}
    world = num_nodes * ranks_per_node
    run = RunFacts(
        name=name,
        on=on,
        nodes=names,
        ranks_per_node=ranks_per_node,
        leaves=leaves,
        layout=dict(layout or {"pp": 1, "replicate": 1, "fsdp": world, "cp": 1, "tp": 1, "ep": 1}),
        is_accelerated=is_accelerated,
        generation_began=MOMENT - step * step_seconds,
        step=step,
        steps=100_000,
        updated_at=MOMENT - 0.3 * step_seconds,
        plan={"step_seconds": step_seconds, **{f"{phase}_seconds": value for phase, value in seconds.items()}},
        step_seconds_low=0.9 * step_seconds,
        step_seconds_high=1.12 * step_seconds,
        ledger={"start": 60.0, "compile": 40.0, "productive": step * step_seconds},
        dollars_per_hour=55.0 * num_nodes if dollars_per_hour is None else dollars_per_hour,
    )
    ranks = [
        _rank(number, names[number // ranks_per_node], number % ranks_per_node, step, seconds, jitter, dice)
        for number in range(world)
    ]
    nodes = [_node(node, leaves[node], ranks_per_node if is_accelerated else 0, dice) for node in names]
    steps = range(max(1, step - 200), step + 1)
    return Snapshot(
        moment=MOMENT,
        run=run,
        scheduler=SchedulerState("running", job="4711", nodes=tuple(NodeWord(node, "ALLOCATED") for node in names)),
        ranks=tuple(_in_step(ranks)),
        nodes=tuple(nodes),
        tiers=(
            SnapshotTier("shared", step - 200, MOMENT - 200 * step_seconds, 30.0, 30.0, 2e9, 2e9, 900.0),
            SnapshotTier("peer", step - 5, MOMENT - 5 * step_seconds, 0.5, 0.5, None, None, 10 * step_seconds),
        ),
        series=Series(
            loss=tuple((element, 2.4 - 1e-5 * element + dice.gauss(0.0, 0.01)) for element in steps),
            gradient_norm=tuple((entry, abs(dice.gauss(0.4, 0.02))) for entry in steps),
            step_seconds=tuple((item, step_seconds * (1 + abs(dice.gauss(0.0, jitter)))) for item in steps),
        ),
    )


def with_run(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, run=replace(snapshot.run, **changes))


def with_scheduler(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, scheduler=replace(snapshot.scheduler, **changes))


def with_ranks(snapshot: Snapshot, change: Callable[[SnapshotRank], SnapshotRank]) -> Snapshot:
    return replace(snapshot, ranks=tuple(change(rank) for rank in snapshot.ranks))


def with_rank(snapshot: Snapshot, number: int, **changes: Any) -> Snapshot:
    return with_ranks(snapshot, lambda rank: replace(rank, **changes) if rank.rank == number else rank)


def with_nodes(snapshot: Snapshot, change: Callable[[SnapshotNode], SnapshotNode]) -> Snapshot:
    return replace(snapshot, nodes=tuple(change(node) for node in snapshot.nodes))


def with_node(snapshot: Snapshot, name: str, **changes: Any) -> Snapshot:
    return with_nodes(snapshot, lambda node: replace(node, **changes) if node.name == name else node)


def with_gpu(snapshot: Snapshot, node: str, index: int | None = None, **changes: Any) -> Snapshot:
    """Changes one card of a node, or all of them."""

    def changed(gpu: SnapshotGpu) -> SnapshotGpu:
        return replace(gpu, **changes) if index in (None, gpu.index) else gpu

    return with_nodes(
        snapshot, lambda item: replace(item, gpus=tuple(map(changed, item.gpus))) if item.name == node else item
    )


def with_device(snapshot: Snapshot, node: str, index: int | None = None, **changes: Any) -> Snapshot:
    """Changes one network card of a node, or all of them."""

    def changed(each: SnapshotNode) -> SnapshotNode:
        if each.name != node:
            return each
        devices = enumerate(each.fabric)
        return replace(each, fabric=tuple(replace(d, **changes) if index in (None, n) else d for n, d in devices))

    return with_nodes(snapshot, changed)


def with_mount(snapshot: Snapshot, path: str, node: str | None = None, **changes: Any) -> Snapshot:
    """Changes a file system, as all nodes or one of them sees it."""

    def changed(each: SnapshotNode) -> SnapshotNode:
        if node not in (None, each.name):
            return each
        return replace(each, mounts=tuple(replace(m, **changes) if m.path == path else m for m in each.mounts))

    return with_nodes(snapshot, changed)


def with_host(snapshot: Snapshot, node: str | None = None, **changes: Any) -> Snapshot:
    """Changes the host of one node, or of all."""
    return with_nodes(
        snapshot,
        lambda item: (
            replace(item, host=replace(item.host or SnapshotHost(), **changes)) if node in (None, item.name) else item
        ),
    )


def with_tier(snapshot: Snapshot, tier: str, **changes: Any) -> Snapshot:
    return replace(
        snapshot, tiers=tuple(replace(item, **changes) if item.tier == tier else item for item in snapshot.tiers)
    )


def with_log(snapshot: Snapshot, pattern: str, line: str, rank: int | None = None, node: str = "") -> Snapshot:
    return replace(snapshot, logs=(*snapshot.logs, LogMatch(pattern, line, rank, node, snapshot.moment)))


def slowed(
    snapshot: Snapshot,
    factors: Mapping[int, float],
    phase: str = "compute",
    *,
    since_start: bool = False,
) -> Snapshot:
    """A phase of some ranks takes so many times as long, and the others wait for them in their collectives.

    In lock-step everybody takes the step time of the slowest, so that a rank waits by what it is ahead.
    """

    def changed(values: Mapping[str, float], rank: int) -> dict[str, float]:
        return {**values, phase: values[phase] * factors.get(rank, 1.0)}

    recent = _in_step([replace(rank, recent=changed(rank.recent, rank.rank)) for rank in snapshot.ranks])
    before = [rank.recent["step"] for rank in snapshot.ranks]
    after = [rank.recent["step"] for rank in recent]
    ranks = [replace(rank, step_seconds=rank.recent["step"]) for rank in recent]
    if since_start:
        ranks = [replace(rank, earlier=dict(rank.recent)) for rank in ranks]
    growth = max(after) / max(before)
    first = 0 if since_start else snapshot.series.step_seconds[-NUM_RECENT][0]
    series = tuple((step, value * growth if step >= first else value) for step, value in snapshot.series.step_seconds)
    return replace(snapshot, ranks=tuple(ranks), series=replace(snapshot.series, step_seconds=series))


def slowed_all(snapshot: Snapshot, factor: float, phase: str, *, since_start: bool = False) -> Snapshot:
    """The same phase takes every rank so many times as long."""
    factors = {rank.rank: factor for rank in snapshot.ranks}
    if phase != "communication":
        return slowed(snapshot, factors, phase, since_start=since_start)

    def changed(rank: SnapshotRank) -> SnapshotRank:
        recent = {**rank.recent, phase: rank.recent[phase] * factor}
        recent["step"] = sum(seconds for item, seconds in recent.items() if item != "step")
        earlier = dict(recent) if since_start else rank.earlier
        return replace(rank, recent=recent, earlier=earlier, step_seconds=recent["step"])

    return with_ranks(snapshot, changed)


def hung(
    snapshot: Snapshot, culprits: Mapping[int, str] | None = None, seconds: float = 900.0, behind: int = 1
) -> Snapshot:
    """Nobody moves. Culprits (rank → the kind it is in) have stood still for longest and are `behind` the others, which
    wait for them in a collective of their step; without culprits all stand at the same place."""
    guilty = dict(culprits or {})

    def changed(rank: SnapshotRank) -> SnapshotRank:
        if rank.rank in guilty:
            step = None if rank.step is None else rank.step - behind
            return replace(rank, kind=guilty[rank.rank], progress_age_seconds=seconds, step=step)
        return replace(rank, kind="productive", progress_age_seconds=seconds - (2.0 if guilty else 0.0))

    return with_run(with_ranks(snapshot, changed), updated_at=snapshot.moment - seconds)


def asked_ras(snapshot: Snapshot, behind: Mapping[int, int] | None = None, missing: tuple[int, ...] = ()) -> Snapshot:
    """NCCL's RAS was asked twice; ranks in `behind` have begun so many operations less, and counts stand still."""
    counts = {rank.rank: 100_000 - (behind or {}).get(rank.rank, 0) for rank in snapshot.ranks}
    known = {rank: count for rank, count in counts.items() if rank not in missing}
    world = Communicator("0x1", len(counts), known, dict(known), 5.0, missing)
    return replace(snapshot, collectives=Collectives((world,), snapshot.collectives.stuck, ras_asked=True))


def without_hardware(snapshot: Snapshot) -> Snapshot:
    """The same run where nobody tells of GPUs, network, file systems or hosts."""
    return with_nodes(
        snapshot,
        lambda node: SnapshotNode(
            node.name, node.leaf, node.host_name, node.heartbeat_age_seconds, node.heartbeat_state
        ),
    )


def _rank(
    number: int, node: str, gpu: int, step: int, seconds: Mapping[str, float], jitter: float, dice: random.Random
) -> SnapshotRank:
    def noisy() -> dict[str, float]:
        return {phase: value * max(0.1, 1 + dice.gauss(0.0, jitter)) for phase, value in seconds.items()}

    return SnapshotRank(
        rank=number,
        node=node,
        gpu=gpu,
        pid=1000 + number,
        is_alive=True,
        kind="productive",
        progress_age_seconds=0.4 * sum(seconds.values()),
        is_stopped=False,
        process_state="R",
        step=step,
        step_seconds=sum(seconds.values()),
        recent=noisy(),
        earlier=noisy(),
        num_recent=NUM_RECENT,
        num_earlier=NUM_EARLIER,
        memory_bytes=60e9,
        gradient_norm=abs(dice.gauss(0.4, 0.02)),
        gradient_norm_usual=0.4,
    )


def _in_step(ranks: list[SnapshotRank]) -> list[SnapshotRank]:
    """Everybody takes the time of the slowest: who is ahead waits in its collectives."""
    found = []
    for name in ("recent", "earlier"):
        work = {
            rank.rank: sum(
                seconds for phase, seconds in getattr(rank, name).items() if phase not in ("communication", "step")
            )
            for rank in ranks
        }
        least = min(getattr(rank, name)["communication"] for rank in ranks)
        slowest = max(work.values()) + least
        found.append({rank: slowest - spent for rank, spent in work.items()})
    lasting = [
        (
            rank,
            {**rank.recent, "communication": found[0][rank.rank]},
            {**rank.earlier, "communication": found[1][rank.rank]},
        )
        for rank in ranks
    ]
    return [
        replace(
            rank,
            recent={**recent, "step": sum(value for phase, value in recent.items() if phase != "step")},
            earlier={**earlier, "step": sum(value for phase, value in earlier.items() if phase != "step")},
        )
        for rank, recent, earlier in lasting
    ]


def _node(name: str, leaf: str, num_gpus: int, dice: random.Random) -> SnapshotNode:
    gpus = tuple(
        SnapshotGpu(
            index=index,
            throttle=(),
            throttled_share=0.0,
            sm_clock_mhz=1900.0 + dice.gauss(0.0, 10.0),
            max_sm_clock_mhz=1980.0,
            utilisation=0.99,
            temperature_celsius=58.0 + dice.gauss(0.0, 3.0),
            power_watts=620.0,
            power_limit_watts=700.0,
            default_power_limit_watts=700.0,
            memory_used_share=0.8,
            uncorrectable_errors=0,
            correctable_errors_per_hour=0.0,
            remap_pending=False,
            remap_failed=False,
            recovery_action="None",
            nvlinks_up=18,
            nvlinks=18,
            nvlink_errors_per_second=0.0,
            pcie_share=1.0,
            pcie_replays_per_second=0.0,
        )
        for index in range(num_gpus)
    )
    fabric = tuple(
        SnapshotFabricDevice(
            name=f"rdmap{index}s0",
            is_active=True,
            sent_bytes_per_second=5e9 * (1 + dice.gauss(0.0, 0.02)),
            retransmitted_share=1e-6,
            drops_per_second=0.0,
            errors_per_second=0.0,
            peer_events=0.0,
            link_downs=0.0,
        )
        for index in range(num_gpus)
    )
    return SnapshotNode(
        name=name,
        leaf=leaf,
        host_name=name,
        heartbeat_age_seconds=0.5,
        heartbeat_state="running",
        gpus=gpus,
        gpus_known=num_gpus > 0,
        expected_gpus=num_gpus or None,
        fabric=fabric,
        expected_fabric=num_gpus or None,
        nccl_network="AWS Libfabric" if num_gpus else "",
        nccl_interfaces=num_gpus or None,
        mounts=(
            SnapshotMount(
                "/fsx",
                "lustre",
                ("data", "checkpoints", "run"),
                read_bytes_per_second=2e8,
                write_bytes_per_second=5e7,
                operation_seconds=0.004,
                usual_operation_seconds=0.004,
                metadata_seconds=0.0008,
                usual_metadata_seconds=0.0008,
                full_share=0.4,
                inodes_full_share=0.1,
                is_stalled=False,
                is_read_only=False,
            ),
        ),
        host=SnapshotHost(
            processors=192,
            load=30.0 + dice.gauss(0.0, 5.0),
            processor_pressure=0.01,
            memory_pressure=0.0,
            steal_share=0.0,
            memory_available_share=0.7,
            swapped_bytes_per_second=0.0,
            foreign_processor_share=0.01,
            blocked_processes=(),
            clock_offset_seconds=1e-5,
            out_of_memory_kills=0,
            shared_memory_full_share=0.1,
        ),
    )
