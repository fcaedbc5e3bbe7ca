"""Measure this machine's CPU, memory and loopback in a few seconds.

Everything is measured the way training runs it: matmuls by torch, one thread per core, all cores at once; operations,
optimizer, loop and collectives as a rank calls them. Torch runs in a child process so that the caller stays light.
Without torch, numpy does the matmul, bf16 gets the fp32 rate, and the other costs are not known; the methods say so.
Rates count CPU time, so that a busy machine does not look slow; only loopback and collectives count wall time.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from threading import Thread
from typing import Any

import numpy

from craton.formatting import setting
from craton.infrastructure.hardware import HostCosts
from craton.infrastructure.load import usable_cores
from craton.infrastructure.torch_program import TORCH_PROGRAM

BUDGET_SECONDS = 30.0  # mostly for a slow start of torch; six are usual
PART_SECONDS = 0.3  # of each measurement
MATRIX_SIZE = 512  # large enough for every BLAS to reach its plateau, 3 to 20 ms on a laptop core
COPY_BYTES = 128 * 2**20  # beyond the last-level cache of everything up to a large server
MESSAGE_BYTES = 2**20
NOT_STARTED = "torch did not start"


@dataclass(frozen=True)
class Measurement:
    fp32_flops: float
    bf16_flops: float
    bf16_method: str  # "torch, one thread a core", or why the fp32 rate is used
    memory_bytes_per_second: float  # copies: read and write counted
    loopback_bytes_per_second: float  # TCP over 127.0.0.1, one direction
    load_average: float  # of the minute before; near or above the number of cores, the loopback is too slow
    fp32_method: str = "torch, one thread a core"
    host: HostCosts | None = None  # None: without torch nothing is known


def measure(budget_seconds: float = BUDGET_SECONDS) -> Measurement:
    """Measure everything; the torch child gets the budget that memory and loopback leave."""
    deadline = time.perf_counter() + budget_seconds
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    part_seconds = min(PART_SECONDS, budget_seconds / 10)
    memory_bytes_per_second = measure_copy(part_seconds)
    loopback_bytes_per_second = measure_loopback(part_seconds)
    flops, host, method = measure_torch(part_seconds, deadline - time.perf_counter())
    fp32_flops, fp32_method = (
        (flops[0], method) if flops else (measure_matrix_product(part_seconds), "numpy, all cores")
    )
    return Measurement(
        fp32_flops=fp32_flops,
        fp32_method=fp32_method,
        bf16_flops=flops[1] if flops else fp32_flops,
        bf16_method=method,
        memory_bytes_per_second=memory_bytes_per_second,
        loopback_bytes_per_second=loopback_bytes_per_second,
        load_average=load_average,
        host=host,
    )


def measure_matrix_product(seconds: float) -> float:
    """Return FLOP/s of numpy's best fp32 matmul."""
    matrix = numpy.random.default_rng(0).random((MATRIX_SIZE, MATRIX_SIZE), dtype=numpy.float32)
    out = numpy.empty_like(matrix)
    return 2 * MATRIX_SIZE**3 / _best(lambda: numpy.matmul(matrix, matrix, out=out), seconds)


def measure_copy(seconds: float) -> float:
    """Return bytes read and written per second when all cores copy at once."""
    cores = usable_cores()

    def copy(part: int) -> float:
        source = numpy.ones(COPY_BYTES // 8 // cores)
        target = numpy.empty_like(source)
        return 2 * source.nbytes / _best(lambda: numpy.copyto(target, source), seconds, time.thread_time)

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(copy, range(cores)))


def measure_loopback(seconds: float) -> float:
    """Return bytes per second through one TCP connection of this machine to itself."""
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


def measure_torch(seconds: float, allowed_seconds: float) -> tuple[tuple[float, float] | None, HostCosts | None, str]:
    """Return FLOP/s of torch's fp32 and bf16 matmuls, its costs per call, and the method; None, None and the reason if
    they cannot be measured."""
    found = _run_torch(seconds, allowed_seconds)
    if isinstance(found, str):
        return None, None, f"fp32 rate: {found}"
    host = HostCosts(**{field.name: float(found["host"][field.name]) for field in fields(HostCosts)})
    numbers = (found["fp32"], found["bf16"], *(getattr(host, field.name) for field in fields(host)))
    assert all(0 < number < math.inf for number in numbers), found
    return (found["fp32"], found["bf16"]), host, "torch, one thread a core"


def measure_operation(allowed_seconds: float = BUDGET_SECONDS) -> float | str:
    """Return the host's seconds per operation of an eager forward pass, or why they cannot be measured."""
    found = _run_torch(PART_SECONDS, allowed_seconds, "operations")
    return found if isinstance(found, str) else float(found["operation_seconds"])


def _run_torch(seconds: float, allowed_seconds: float, *part: str) -> dict[str, Any] | str:
    """Run TORCH_PROGRAM in a child process; return what it printed, or why it did not."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    command = [sys.executable, "-c", TORCH_PROGRAM, str(MATRIX_SIZE), str(seconds), str(usable_cores()), *part]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # it forks a second rank, which must end with it
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    try:
        output, errors = child.communicate(timeout=max(allowed_seconds, 0.1))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return f"{NOT_STARTED} within {setting(allowed_seconds)}; measure again now that it is warm"
    if child.returncode != 0:
        reason = (errors.strip().splitlines() or [f"exit {child.returncode}"])[-1]
        return f"torch is installed but failed: {reason}"
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _best(work: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the shortest time of `work`, repeated for `seconds` after one warm-up run."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = clock()
        work()
        if (took := clock() - start) > 0:  # a coarse clock may not have moved
            times.append(took)
    return min(times)


def _send_for(address: tuple[str, int], seconds: float) -> None:
    message = bytes(MESSAGE_BYTES)
    with socket.create_connection(address) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(message)
