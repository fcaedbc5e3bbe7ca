"""Measure all-reduce bandwidth between pairs of nodes (or GPUs), to find the unit that is slow with every partner.

Ranks coordinate over gloo. The measured all-reduce runs over NCCL on GPUs, else over gloo. A unit is the ranks of one
node, so a pair is comparable to published two-node measurements.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from craton.agent.processes import address_towards, pin_interfaces
from craton.ml.selftest.pairs import Pair, next_pairs, slow_pairs, suspects
from craton.ml.store import join_group_of_environment

GPU_MEGABYTES, CPU_MEGABYTES = 256.0, 4.0
TRIES, TIMES = 4, 4
SECRET_VARIABLE = "CRATON_SELFTEST_SECRET"  # environment variable: the same on all ranks, new for every test
LIMIT = timedelta(seconds=120)  # a partner that never joins is an error, not a hang


def measure_pairs(unit_ranks: int, megabytes: float | None, expected: float) -> dict[str, Any] | None:
    """Measure all pairs and return the result on rank 0; None on the other ranks."""
    rank, world, local = place()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local % torch.cuda.device_count()) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    if world % unit_ranks:
        raise SystemExit(
            f"world size {world} is not a multiple of --unit-ranks {unit_ranks}; start the same number on every node"
        )
    _join(rank, world)
    try:
        return _measure(rank, unit_ranks, megabytes or (GPU_MEGABYTES if is_gpu else CPU_MEGABYTES), expected, device)
    finally:
        dist.destroy_process_group()


def _join(rank: int, world: int) -> None:
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret:
        with suppress(OSError):  # without a route, gloo uses the address of the host name
            pin_interfaces(address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        join_group_of_environment("gloo", secret.encode(), rank, world, LIMIT)
        return
    if rank == 0:
        print(
            f"{SECRET_VARIABLE} is not set: the ranks use torch's own TCPStore, which is not authenticated",
            file=sys.stderr,
        )
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=LIMIT)


def place() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as torchrun or srun set them."""
    environment = os.environ
    if "RANK" in environment:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return rank, world, int(environment.get("LOCAL_RANK", 0))
    if "SLURM_PROCID" in environment:
        rank, world = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        return rank, world, int(environment["SLURM_LOCALID"])
    raise SystemExit("set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start with srun or torchrun")


def _measure(
    rank: int, unit_ranks: int, megabytes: float, expected: float, device: torch.device
) -> dict[str, Any] | None:
    units = dist.get_world_size() // unit_ranks
    names = _gathered(os.environ.get("SLURMD_NODENAME") or socket.gethostname())[::unit_ranks]
    buffer = torch.ones(int(megabytes * 2**20) // 4, dtype=torch.float32, device=device)
    rounds: list[dict[Pair, float]] = []
    while pairs := next_pairs(rounds, units, expected):
        rounds.append(_round(pairs, rank, unit_ranks, buffer))
    if rank:
        return None
    return {
        "backend": _backend(device),
        "names": names,
        "unit_ranks": unit_ranks,
        "size_bytes": buffer.numel() * 4,
        "expected_bytes_per_second": expected,
        "rounds": [[{"pair": pair, "bytes_per_second": rate} for pair, rate in item.items()] for item in rounds],
        "slow_pairs": sorted(slow_pairs(rounds, expected)),
        "slow_units": suspects(rounds, units, expected),
    }


def _round(pairs: list[Pair], rank: int, unit_ranks: int, buffer: torch.Tensor) -> dict[Pair, float]:
    """Measure all pairs at the same time; return buffer bytes per second of each."""
    mine: tuple[Pair, Any] | None = None
    for pair in pairs:  # torch requires every rank to create every group, in the same order
        members = [unit * unit_ranks + item for unit in pair for item in range(unit_ranks)]
        group = dist.new_group(members, timeout=LIMIT, backend=_backend(buffer.device))
        if rank in members:
            mine = pair, group
    seconds = exchange(buffer, mine[1]) if mine else 0.0
    if mine:
        dist.destroy_process_group(mine[1])
    answers = _gathered((mine[0], seconds) if mine else None)
    slowest: dict[Pair, float] = {}
    for entry in answers:
        if entry is not None:
            slowest[entry[0]] = max(slowest.get(entry[0], 0.0), entry[1])
    return {pair: buffer.numel() * buffer.element_size() / slowest[pair] for pair in pairs}


def exchange(buffer: torch.Tensor, group: Any) -> float:
    """Return the seconds of one all-reduce of the buffer in the group: the best of several tries, since other load only
    makes a try slower. The operation is MAX, which never overflows."""
    best = float("inf")
    for _ in range(1 + TRIES):  # the first one opens the connections and is never the best
        _wait(buffer)
        begin = time.perf_counter()
        for _ in range(TIMES):
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
        _wait(buffer)
        best = min(best, (time.perf_counter() - begin) / TIMES)
    return best


def _gathered(value: Any) -> list[Any]:
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _wait(buffer: torch.Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
