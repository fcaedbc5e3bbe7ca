"""Time of the parts of an eager step on a CPU, from the costs that were measured on it and the load of the machine.

Pure functions of plain numbers. `gpu.cpu` must be known. Operations below `PARALLEL_ELEMENTS` and matmuls below
`PARALLEL_VOLUME` run on one thread, as PyTorch and OpenBLAS run them; a matmul just above that takes less time.
"""

from __future__ import annotations

import math

from craton.infrastructure import CpuRank
from craton.planning.rates.kernels import GpuRates, flops_per_score

PARALLEL_ELEMENTS = 32768.0  # at::internal::GRAIN_SIZE
PARALLEL_VOLUME = 262144.0  # rows · n · k: SMP_THRESHOLD_MIN · GEMM_MULTITHREAD_THRESHOLD of OpenBLAS
# How long BLAS threads wait for each other in one matmul, times the root of the slowdown that other processes cause:
# steps with 90 to 490 such matmuls beside one to three processes, two Arm cores, 2026-11-18.
THREAD_WAIT_SECONDS = 2.2e-3
# Exponentials per score of attention with a mask, forward and backward, the other element-wise work counted as such:
# scaled_dot_product_attention at head widths 16, 32 and 64, torch 2.13.0 on an Arm core, 2026-11-18.
SCORE_EXPONENTIALS = (1.4, 2.1)


def cpu_of(gpu: GpuRates) -> CpuRank:
    assert gpu.cpu is not None, f"{gpu.generation}: the costs of a CPU were not measured"
    return gpu.cpu


def cpu_matmul_seconds(rows: float, n: float, k: float, precision: str, gpu: GpuRates) -> float:
    """[rows, k] × [k, n]: FLOPs at the rate of large matrices, and every element of operands and result. Threads of one
    matmul wait for each other, which takes long if another process runs on the core of one of them."""
    cpu = cpu_of(gpu)
    elements = (rows + n) * k + rows * n
    flops = 2.0 * rows * n * k / gpu.matrix_flops[precision]
    packing = elements * _matmul_element(precision, gpu)
    if cpu.threads == 1 or rows * n * k <= PARALLEL_VOLUME:
        return (flops * cpu.threads + packing) * cpu.serial_slowdown
    wait = THREAD_WAIT_SECONDS * math.sqrt(cpu.parallel_slowdown - 1.0)
    return (flops + packing / cpu.threads) * cpu.parallel_slowdown + wait


def cpu_attention_seconds(
    scores: float, query_dim: float, value_dim: float, precision: str, gpu: GpuRates, *, backward: bool
) -> float:
    """Fused attention with a mask, which computes masked scores too. `scores`: rows · heads · queries · keys."""
    cpu = cpu_of(gpu)
    flops = scores * flops_per_score(query_dim, value_dim, backward=backward)
    exponentials = scores * SCORE_EXPONENTIALS[backward] * cpu.costs.exponential_seconds
    return (flops / gpu.matrix_flops[precision] + exponentials / cpu.threads) * cpu.serial_slowdown


def cpu_exponential_seconds(elements: float, gpu: GpuRates) -> float:
    cpu = cpu_of(gpu)
    return elements * cpu.costs.exponential_seconds / _threads(elements, gpu) * cpu.serial_slowdown


def cpu_pass_seconds(size_bytes: float, elements: float, gpu: GpuRates) -> float:
    """Element-wise passes over tensors of `elements`, with `size_bytes` of traffic together."""
    cpu = cpu_of(gpu)
    rate = gpu.elementwise_bytes_per_second / cpu.threads * _threads(elements, gpu)
    return size_bytes / rate * cpu.serial_slowdown


def _threads(elements: float, gpu: GpuRates) -> float:
    return min(float(cpu_of(gpu).threads), max(1.0, elements / PARALLEL_ELEMENTS))


def _matmul_element(precision: str, gpu: GpuRates) -> float:
    """Seconds per element: a precision without kernels of its own is slower throughout, not only in its FLOPs."""
    slower = gpu.matrix_flops["fp32"] / gpu.matrix_flops[precision]
    return cpu_of(gpu).costs.matmul_element_seconds * max(1.0, slower)
