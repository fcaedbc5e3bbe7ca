"""The machine that an engine runs on: the catalog's numbers of its GPU, with measured memory bandwidth and FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from craton.infrastructure import CatalogError, Gpu
from craton.infrastructure.catalog import gpu as catalog_gpu
from craton.planning.rates import MachineRates, machine_of_ranks

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
SIDE = {"cuda": 8192, "cpu": 512}
TRIES = 5  # the fastest counts
GENERATIONS = {7: "volta", 8: "ampere", 9: "hopper"}  # by the major compute capability; later ones: Blackwell


def measured_machine(device: torch.device, dtype: torch.dtype, ranks: int = 1) -> MachineRates:
    """Measure bytes/s of a large copy (read plus write) and FLOP/s of a large matmul, in less than a second. `ranks` of
    a tensor-parallel group are on GPUs of one node."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bytes_per_second = 2 * source.numel() / _best(lambda: target.copy_(source), device)
    side = SIDE[device.type]
    # random numbers: a GPU that multiplies zeros draws less power and is faster
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    flops = 2 * side**3 / _best(lambda: torch.mm(left, right, out=product), device)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    known = machine_of_ranks(_card(device, bytes_per_second, flops), ranks)
    rates = replace(
        known.rates,
        streaming_bytes_per_second=bytes_per_second,
        matrix_flops={**known.rates.matrix_flops, precision: flops},
    )
    return replace(known, rates=rates)


def _card(device: torch.device, bytes_per_second: float, flops: float) -> Gpu:
    """Return the GPU of the catalog; one that is not in it, or a CPU, has the measured rates."""
    if device.type == "cpu":
        name, generation, memory_bytes = "cpu", "cpu", 0.0
    else:
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("Tesla ")
        try:
            return catalog_gpu(name)
        except CatalogError:
            major, _ = torch.cuda.get_device_capability(device)
            generation = GENERATIONS.get(major, "blackwell")
            memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    rates = {"fp32": flops, "bf16": flops}
    return Gpu(name, generation, rates, rates, memory_bytes, bytes_per_second, 0.0, 0.0)


def _best(work: Callable[[], object], device: torch.device) -> float:
    work()
    times = []
    for _ in range(TRIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
