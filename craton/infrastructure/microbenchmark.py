"""What this machine's processor, memory and loopback can do, measured in at most five seconds.

Everything here really runs; only bf16 needs torch, which is started in a child process so that the caller stays light.
Where bf16 cannot be measured the fp32 rate stands in and `bf16_method` says so.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread

import numpy

BUDGET_SECONDS = 5.0
MATRIX_SIZE = 1024  # large enough for every BLAS to reach its plateau, 20 to 200 ms on a laptop core
COPY_BYTES = 128 * 2**20  # beyond the last-level cache of everything up to a large server
MESSAGE_BYTES = 2**20

# Runs in the child: the same product in bf16, best of as many as fit.
TORCH_PROGRAM = """
import sys, time, torch
size, seconds = int(sys.argv[1]), float(sys.argv[2])
a = torch.rand(size, size).to(torch.bfloat16)
a @ a
best, end = float("inf"), time.perf_counter() + seconds
while time.perf_counter() < end:
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(best)
"""


@dataclass(frozen=True)
class Measurement:
    fp32_flops: float
    bf16_flops: float
    bf16_method: str  # "torch 2.9.0", or why the fp32 rate stands in
    memory_bytes_per_second: float  # copies: read and write counted
    loopback_bytes_per_second: float  # TCP over 127.0.0.1, one direction
    load_average: float  # of the last minute before; near or above the number of cores, the rates are too low


def measure(budget_seconds: float = BUDGET_SECONDS) -> Measurement:
    """All four numbers; numpy's parts take 30 % of the budget, the torch child what is left of it."""
    deadline = time.perf_counter() + budget_seconds
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    part_seconds = budget_seconds / 10
    fp32_flops = measure_matrix_product(part_seconds)
    memory_bytes_per_second = measure_copy(part_seconds)
    loopback_bytes_per_second = measure_loopback(part_seconds)
    bf16_flops, bf16_method = measure_bf16(part_seconds, deadline - time.perf_counter())
    return Measurement(
        fp32_flops=fp32_flops,
        bf16_flops=bf16_flops or fp32_flops,
        bf16_method=bf16_method,
        memory_bytes_per_second=memory_bytes_per_second,
        loopback_bytes_per_second=loopback_bytes_per_second,
        load_average=load_average,
    )


def usable_cores() -> int:
    """Cores this process may run on, which in a container is often not all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_matrix_product(seconds: float) -> float:
    """FLOP/s of numpy's best fp32 product."""
    matrix = numpy.random.default_rng(0).random((MATRIX_SIZE, MATRIX_SIZE), dtype=numpy.float32)
    out = numpy.empty_like(matrix)
    return 2 * MATRIX_SIZE**3 / _best(lambda: numpy.matmul(matrix, matrix, out=out), seconds)


def measure_copy(seconds: float) -> float:
    """Bytes read and written per second when all cores copy at once."""
    source = numpy.ones(COPY_BYTES // 8)
    target = numpy.empty_like(source)
    cores = usable_cores()
    bounds = [len(source) * part // cores for part in range(cores + 1)]

    def copy(part: int) -> None:
        piece = slice(bounds[part], bounds[part + 1])
        numpy.copyto(target[piece], source[piece])

    with ThreadPoolExecutor(cores) as pool:
        return 2 * source.nbytes / _best(lambda: list(pool.map(copy, range(cores))), seconds)


def measure_loopback(seconds: float) -> float:
    """Bytes per second through one TCP connection of this machine with itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Thread(target=_send_for, args=(server.getsockname(), seconds), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            buffer = bytearray(MESSAGE_BYTES)
            received, start = 0, time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            elapsed = time.perf_counter() - start
        sender.join()
    return received / elapsed


def measure_bf16(seconds: float, allowed_seconds: float) -> tuple[float, str]:
    """FLOP/s of torch's best bf16 product and how it was got; 0 and the reason when it cannot be measured."""
    if importlib.util.find_spec("torch") is None:
        return 0.0, "fp32 rate: torch is not installed"
    command = [sys.executable, "-c", TORCH_PROGRAM, str(MATRIX_SIZE), str(seconds)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=max(allowed_seconds, 0.1), check=False)
    except subprocess.TimeoutExpired:
        return 0.0, f"fp32 rate: torch did not start within {allowed_seconds:.1f} s; measure again now that it is warm"
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1]
        return 0.0, f"fp32 rate: torch is installed but failed: {reason}"
    best = float(child.stdout)
    assert 0 < best < float("inf"), child.stdout
    return 2 * MATRIX_SIZE**3 / best, "torch, in a process of its own"


def _best(work: Callable[[], object], seconds: float) -> float:
    """Shortest time of a piece of work, run as often as fits after a first time that warms caches and threads."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _send_for(address: tuple[str, int], seconds: float) -> None:
    message = bytes(MESSAGE_BYTES)
    with socket.create_connection(address) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(message)
