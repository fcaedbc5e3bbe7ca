"""Faults of file systems, checkpoints and hosts."""

from __future__ import annotations

from collections.abc import Iterable

from craton.bench.why.scenarios.faults import PEER_GONE, Victim, break_again, fault, level, of_node, of_rank
from craton.bench.why.scenarios.world import Signal, World

# -- storage ---------------------------------------------------------------------------------------------------------


def _lustre(world: World, node: str) -> list[dict[str, str]]:
    return [{"component": "client", "target": f"fsx-OST000{number}-osc"} for number in (0, 1)]


def _slower_lustre(world: World, nodes: Iterable[str], times: float) -> None:
    for node in nodes:
        for target in _lustre(world, node):
            requests = level(world, "craton_lustre_requests_total", node, **target) / 2.0
            seconds = level(world, "craton_lustre_request_seconds_total", node, **target) / 2.0
            world.set("craton_lustre_requests_total", node, requests, **target)
            world.set("craton_lustre_request_seconds_total", node, seconds * times, **target)


@fault("storage", "slow")
def file_system_slow(world: World) -> Victim:
    """Another job saturates the file system: all requests take longer, batches arrive late."""
    _slower_lustre(world, world.nodes, world.chance.uniform(8.0, 40.0))
    world.slow(range(world.world), "data", seconds=world.step_seconds * world.chance.uniform(0.25, 0.8), swing=0.25)
    return Victim()


@fault("storage", "slow")
def client_slow(world: World) -> Victim:
    """The file system is slow for one node only."""
    node = world.draw_node()
    _slower_lustre(world, (node,), world.chance.uniform(10.0, 40.0))
    world.slow(world.ranks_of(node), "data", seconds=world.step_seconds * world.chance.uniform(0.3, 0.8), swing=0.2)
    return of_node(world, node)


@fault("storage", "hung")
def servers_gone(world: World) -> Victim:
    """A file server does not respond: its readers wait."""
    node = world.draw_node()
    victims = dict.fromkeys(world.ranks_of(node), "data")
    world.hang(victims)
    for target in _lustre(world, node):
        world.set("craton_lustre_connected", node, 0.0, world.silence_seconds, **target)
    return of_node(world, node)


def _mount(path: str, kind: str) -> dict[str, str]:
    return {"device": f"{kind}-device", "fstype": kind, "mountpoint": path}


@fault("storage", "healthy slow wrong dead")
def disk_full(world: World) -> Victim:
    """The file system of the checkpoints is full: the newest saves failed; training continues."""
    for node in world.nodes:
        for metric in ("node_filesystem_avail_bytes", "node_filesystem_files_free"):
            world.set(metric, node, 0.0 if "avail" in metric else 9e8, 3000.0, **_mount("/fsx", "lustre"))
    reason = "OSError: [Errno 28] No space left on device: 'step-40/__0_0.distcp'"
    world.saves["shared"] = [{"event": "checkpoint_failed", "reason": reason}] * world.chance.randint(1, 2)
    return Victim()


@fault("storage", "healthy slow wrong dead")
def read_only(world: World) -> Victim:
    """The kernel remounted a node's disk read-only after errors: saves there fail."""
    node = world.nodes[0]
    world.set("node_filesystem_readonly", node, 1.0, 1500.0, **_mount("/scratch", "xfs"))
    reason = "OSError: [Errno 30] Read-only file system: '/scratch/step-40'"
    world.saves["nvme"] = [{"event": "checkpoint_failed", "reason": reason}] * world.chance.randint(2, 4)
    return Victim(node)


@fault("storage", "healthy slow")
def saves_slow(world: World) -> Victim:
    """A target of the file system is being rebuilt: a save outlasts its interval, and the next one is skipped."""
    took = world.chance.uniform(1900.0, 5000.0)
    skipped = int(took // 1800.0)
    world.saves["shared"] = [{"seconds": took}] + [{"event": "checkpoint_skipped"} for _ in range(skipped)]
    _slower_lustre(world, world.nodes, world.chance.uniform(8.0, 30.0))
    return Victim()


@fault("storage", "hung")
def save_hangs(world: World) -> Victim:
    """All ranks wait for rank 0, which cannot finish a checkpoint on a file system that does not respond."""
    node = world.nodes[0]
    world.hang({0: "checkpoint"}, world.chance.uniform(2400.0, 4000.0))
    world.set("node_filesystem_device_error", node, 1.0, world.silence_seconds, **_mount("/fsx", "lustre"))
    return of_rank(world, 0)


@fault("storage", "dead")
def stale_handle(world: World) -> Victim:
    """The file system evicted a client: reads fail."""
    rank = world.draw_rank()
    line = world.chance.choice(
        (
            "OSError: [Errno 116] Stale file handle: '/fsx/data/0007.bin'",
            "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
        )
    )
    world.die(rank, 1, ["Traceback (most recent call last):", line], during="data", echo=PEER_GONE)
    return of_rank(world, rank)


# -- host ------------------------------------------------------------------------------------------------------------


@fault("host", "slow")
def processor_taken(world: World) -> Victim:
    """Another guest on the same machine: the hypervisor takes CPU time."""
    node, share = world.draw_node(), world.chance.uniform(0.2, 0.45)
    world.slow(world.ranks_of(node), "compute", 1.0 + 1.5 * share, swing=0.03)
    for cpu in range(4):
        world.set("node_cpu_seconds_total", node, share, cpu=str(cpu), mode="steal")
        world.set("node_cpu_seconds_total", node, 0.72 - share, cpu=str(cpu), mode="idle")
    return of_node(world, node)


@fault("host", "slow")
def somebody_computes(world: World) -> Victim:
    """A forgotten process uses all CPUs of a node."""
    node = world.draw_node()
    world.slow(world.ranks_of(node), "compute", world.chance.uniform(1.25, 1.9), swing=0.08)
    for cpu in range(4):
        world.set("node_cpu_seconds_total", node, 0.0, cpu=str(cpu), mode="idle")
        world.set("node_cpu_seconds_total", node, 0.99, cpu=str(cpu), mode="user")
    world.set("node_load1", node, 4.0 * world.chance.uniform(3.0, 9.0))
    world.set("node_pressure_cpu_waiting_seconds_total", node, world.chance.uniform(0.6, 0.95))
    return of_node(world, node)


@fault("host", "slow")
def swaps(world: World) -> Victim:
    node = world.draw_node()
    world.slow(world.ranks_of(node), "compute", world.chance.uniform(1.25, 2.0), swing=0.15)
    world.set("node_memory_MemAvailable_bytes", node, 2e12 * world.chance.uniform(0.002, 0.015))
    world.set("node_pressure_memory_stalled_seconds_total", node, world.chance.uniform(0.25, 0.7))
    for metric in ("node_vmstat_pswpin", "node_vmstat_pswpout"):
        world.set(metric, node, world.chance.uniform(2e4, 2e5))
    return of_node(world, node)


@fault("host", "dead")
def killed_for_memory(world: World) -> Victim:
    rank = world.draw_rank()
    node = world.node_of(rank)
    world.die(rank, -9, ["loading shard 7"], during="data", echo=PEER_GONE)
    kill = Signal(0.0, 0.0, is_counter=True, total=0.0, burst=1.0, onset_seconds=world.deaths[0].seconds_ago + 30.0)
    world.show("node_vmstat_oom_kill", node, kill)
    world.set("node_memory_MemAvailable_bytes", node, 2e12 * 0.005, world.deaths[0].seconds_ago + 60.0)
    return of_rank(world, rank)


@fault("host", "hung")
def stopped_by_signal(world: World) -> Victim:
    rank = world.draw_rank()
    world.hang()
    world.stopped.add(rank)
    return of_rank(world, rank)


@fault("host", "dead hung")
def node_vanishes(world: World) -> Victim:
    """Power loss: no heartbeat, no exporter. The other ranks wait in a collective."""
    node = world.draw_node()
    world.hang(seconds=world.chance.uniform(60.0, 200.0))
    world.lost_nodes[node] = world.silence_seconds
    world.hide(node)
    return of_node(world, node)


@fault("host", "dead")
def shared_memory_full(world: World) -> Victim:
    rank = world.draw_rank()
    lines = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.",
    )
    world.die(rank, 1, lines, echo=PEER_GONE)
    return of_rank(world, rank)


@fault("host", "slow")
def killed_again(world: World) -> Victim:
    """A script kills a rank every minute."""
    rank = world.draw_rank()
    break_again(world, world.chance.randint(4, 9), lambda number: (rank, "was killed by SIGKILL"))
    for other in range(world.world):
        if other != rank:
            world.logs.setdefault(other, []).append(PEER_GONE)
    return of_rank(world, rank)


@fault("host", "healthy")
def spare_vanishes(world: World) -> Victim:
    """A spare node is lost before it is needed."""
    node = f"{world.prefix}-spare"
    world.spares = {f"{node}-2": 0.5, node: world.chance.uniform(20.0, 4000.0)}
    return Victim(node)
