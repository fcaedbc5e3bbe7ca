"""Faults of the scheduler, of collectives and of the program itself."""

from __future__ import annotations

from collections.abc import Iterable

from craton.bench.why.scenarios.faults import (
    PEER_GONE,
    Victim,
    break_again,
    fault,
    make_server,
    of_node,
    of_rank,
    show_xid,
)
from craton.bench.why.scenarios.world import World

STEP_FRAME = {"name": "train_step", "filename": "train.py", "line": 88}


# -- scheduler -------------------------------------------------------------------------------------------------------


@fault("scheduler", "waiting")
def waits_for_nodes(world: World) -> Victim:
    world.state, world.steps, world.job_state, world.age_seconds = "waiting", 0, "PENDING", 0.0
    world.job_reason = world.chance.choice(("Resources", "Priority", "ReqNodeNotAvail", "QOSMaxJobsPerUserLimit"))
    return Victim()


def _job_ends(world: World, state: str) -> Victim:
    """Slurm sends SIGTERM to all processes of the job."""
    world.job_state, world.state = state, "lost"
    world.lost_nodes = dict.fromkeys(world.nodes, world.chance.uniform(60.0, 300.0))
    world.silence_seconds = max(world.lost_nodes.values())
    return Victim()


@fault("scheduler", "dead")
def preempted(world: World) -> Victim:
    return _job_ends(world, "PREEMPTED")


@fault("scheduler", "dead")
def out_of_time(world: World) -> Victim:
    return _job_ends(world, "TIMEOUT")


@fault("scheduler", "dead stopped")
def cancelled(world: World) -> Victim:
    return _job_ends(world, "CANCELLED")


@fault("scheduler host", "dead")
def node_failed(world: World) -> Victim:
    """The scheduler lost a node and ended the job: reported by the scheduler, caused by the host."""
    node = world.draw_node()
    _job_ends(world, "NODE_FAIL")
    world.lost_nodes = {item: 200.0 + 90.0 * (item == node) for item in world.nodes}
    world.hide(node)
    return of_node(world, node)


# -- collectives -----------------------------------------------------------------------------------------------------


def _recordings(world: World, operations: dict[int, str], missing: Iterable[int] = ()) -> None:
    """Write flight recorder dumps after a timeout: all ranks finished collectives 40 to 47, then called these at 48,
    except the missing ones."""
    everyone = list(range(world.world))
    for rank in everyone:
        entries = [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": sequence,
                "is_p2p": False,
                "profiling_name": "nccl:all_reduce" if sequence < 48 else operations.get(rank, "nccl:all_reduce"),
                "input_sizes": [[4096]],
                "output_sizes": [[4096]],
                "state": "completed" if sequence < 48 else "started",
                "frames": [STEP_FRAME],
            }
            for sequence in range(40, 48 if rank in missing else 49)
        ]
        group = {"0": {"name": "0", "desc": "default_pg", "ranks": str(everyone)}}
        world.recordings[rank] = {"version": "2.5", "pg_config": group, "entries": entries}


@fault("collective", "hung")
def calls_another_collective(world: World) -> Victim:
    """A branch of the program depends on the rank."""
    rank = world.draw_rank()
    world.hang()
    _recordings(world, {rank: "nccl:_all_gather_base"})
    return of_rank(world, rank)


@fault("collective framework", "hung")
def never_enters(world: World) -> Victim:
    """One rank is elsewhere in its code: the recorders show which collective it misses, not what it does."""
    rank = world.draw_rank()
    world.hang()
    _recordings(world, {}, missing=(rank,))
    return of_rank(world, rank)


# -- framework -------------------------------------------------------------------------------------------------------


@fault("framework", "dead")
def raises(world: World) -> Victim:
    rank = world.draw_rank()
    errors = (
        "ValueError: expected sequence of length 4096, got 4095",
        "KeyError: 'labels'",
        "AssertionError: bad batch",
    )
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 88, in train_step',
        world.chance.choice(errors),
    ]
    world.die(rank, 1, lines, echo=PEER_GONE)
    return of_rank(world, rank)


@fault("framework", "dead")
def card_memory_too_small(world: World) -> Victim:
    rank = world.draw_rank()
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB"
    )
    world.die(rank, 1, ["Traceback (most recent call last):", text], echo=PEER_GONE)
    return of_rank(world, rank)


@fault("framework", "dead")
def illegal_access(world: World) -> Victim:
    """A bug in a CUDA kernel, with XID 31 or 13, which NVIDIA attributes to the program first."""
    rank = world.draw_rank()
    world.die(rank, 1, ["torch.AcceleratorError: CUDA error: an illegal memory access was encountered"], echo=PEER_GONE)
    show_xid(world, rank, world.chance.choice((31, 13)), world.deaths[0].seconds_ago + 1.0)
    return of_rank(world, rank)


@fault("framework", "dead")
def native_crash(world: World) -> Victim:
    rank = world.draw_rank()
    world.die(
        rank,
        -11,
        ["Fatal Python error: Segmentation fault", "", "Thread 0x00007f (most recent call first):"],
        echo=PEER_GONE,
    )
    return of_rank(world, rank)


@fault("framework", "wrong")
def not_a_number(world: World) -> Victim:
    world.loss_after[world.chance.randint(3, 25)] = None
    return Victim()


@fault("framework", "wrong")
def diverges(world: World) -> Victim:
    last = world.chance.randint(16, 30)
    for number in range(last):
        world.loss_after[last - number] = min(7.0, 0.35 * (number + 1) * world.chance.uniform(0.9, 1.1))
    return Victim()


@fault("framework", "slow")
def recompiles(world: World) -> Victim:
    world.slow(range(world.world), "compute", world.chance.uniform(1.3, 2.0), swing=0.15)
    for rank in range(world.world):
        world.logs.setdefault(rank, []).append(
            f"W1116 02:11:09.1 [rank{rank}] torch/_dynamo/convert_frame.py: torch._dynamo hit config.recompile_limit"
        )
    return Victim()


@fault("framework", "slow")
def loader_slow(world: World) -> Victim:
    """Too few loader workers for the preprocessing; disks and CPUs have headroom."""
    world.slow(range(world.world), "data", seconds=world.step_seconds * world.chance.uniform(0.25, 0.6), swing=0.15)
    return Victim()


@fault("framework", "slow")
def more_work_for_one(world: World) -> Victim:
    """Longer samples for one rank than for the others; its GPU and host are healthy."""
    rank = world.draw_rank()
    world.slow((rank,), "compute", world.chance.uniform(1.2, 1.6))
    return of_rank(world, rank)


@fault("framework", "hung")
def compiler_waits(world: World) -> Victim:
    """One rank waits for a stale lock in the compiler cache."""
    rank = world.draw_rank()
    world.steps, world.age_seconds = 0, 0.0
    world.hang({item: "productive" if item != rank else "compile" for item in range(world.world)}, 5400.0)
    return of_rank(world, rank)


@fault("framework", "slow")
def optimizer_slow(world: World) -> Victim:
    world.slow(range(world.world), "optimizer", 1.0, world.step_seconds * world.chance.uniform(0.25, 0.5))
    return Victim()


@fault("framework", "slow")
def raises_again(world: World) -> Victim:
    """A bad batch: one rank fails on it after each restart."""
    rank = world.draw_rank()
    words = "exited with code 1 (generation {}): KeyError: 'labels'"
    break_again(world, world.chance.randint(4, 9), lambda number: (rank, words.format(number)))
    if world.chance.random() < 0.5:
        world.logs.setdefault(rank, []).extend(["Traceback (most recent call last):", "KeyError: 'labels'"])
    return of_rank(world, rank)


@fault("framework", "slow")
def too_many_requests(world: World) -> Victim:
    """Requests arrive faster than they complete: the queue only grows."""
    make_server(world)
    running, rate, before = world.chance.randint(4, 32), world.chance.uniform(0.5, 4.0), world.chance.uniform(120, 400)
    world.queue = lambda ago: (running, running + int(rate * max(0.0, before - ago)))
    return Victim()
