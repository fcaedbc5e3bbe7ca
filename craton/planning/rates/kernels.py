"""Time of matmuls, attention and element-wise kernels on one GPU, from shapes and rates alone.

The level is that of short benchmarks on an idle GPU: a GPU at its power limit is some 10% slower, and stacks differ;
both are constants of a software profile. This module models the dependence on shape, precision and generation.

Guarantees: pure functions of plain numbers (fractions of a row or head are fine); larger shapes are never faster,
more FLOP/s or bandwidth never slower. Tile quantisation is left out: on measured sweeps it is noise of ± 5%.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Literal

from craton.infrastructure import CpuRank

AttentionKernel = Literal["best", "flash2"]

# Bytes per element of an operand with its share of the scales, and the catalog's names of its rate, nearest first.
OPERAND_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
RATE_NAMES = {
    "fp32": ("fp32", "bf16", "fp16"),
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
    "nvfp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
}
OUTPUT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0, "mxfp8": 2.0, "nvfp4": 2.0}
TILE_ROWS = 128.0  # queries per multiprocessor in fused attention
MIN_GROUP_ROWS = 64.0  # minimum tile of a grouped matmul


@dataclass(frozen=True, slots=True)
class AttentionRates:
    multiprocessors: float
    launch_seconds: float
    forward_64: float
    forward_128: float
    forward_160: float
    backward_64: float
    backward_128: float
    backward_160: float
    extra_keys_forward: float
    extra_keys_backward: float
    longest_tile: float
    fp8_gain: float
    narrow_level: float

    def efficiency(self, width: float, backward: bool) -> float:
        """Return the share of the 16-bit peak, interpolated between measured head widths; proportional below 32."""
        narrow, middle, wide = (
            (self.backward_64, self.backward_128, self.backward_160)
            if backward
            else (self.forward_64, self.forward_128, self.forward_160)
        )
        if width <= 32.0:
            return narrow * self.narrow_level * width / 32.0
        if width <= 64.0:
            return narrow * (self.narrow_level + (1.0 - self.narrow_level) * (width - 32.0) / 32.0)
        if width <= 128.0:
            return narrow + (middle - narrow) * (width - 64.0) / 64.0
        return middle + (wide - middle) * min(1.0, (width - 128.0) / 32.0)


@dataclass(frozen=True, slots=True, eq=False)
class GpuRates:
    """Rates of one GPU; created by `gpu_rates` and compared by identity."""

    generation: str
    peak_flops: Mapping[str, float]  # dense, by precision
    matrix_flops: Mapping[str, float]  # of a large matmul, by precision
    memory_bytes_per_second: float  # data sheet
    streaming_bytes_per_second: float  # of a long streaming kernel
    elementwise_bytes_per_second: float  # of norms, activations and casts
    kernel_launch_seconds: float
    output_passes: float
    step_seconds: float
    grouped_level: float
    grouped_memory: float
    attention: Mapping[str, AttentionRates]  # by kernel
    cpu: CpuRank | None = None  # of a CPU whose operations were measured
    operation_seconds: float = 0.0  # host time to issue one operation; 0 of a CPU, whose `cpu` has it


def gpu_rates(
    generation: str,
    flops: Mapping[str, float],
    achievable_flops: Mapping[str, float],
    memory_bytes_per_second: float,
    cpu: CpuRank | None = None,
    operation_seconds: float = 0.0,
) -> GpuRates:
    """Combine a catalog's rates ("fp32", "fp16", "bf16", "fp8", "fp4") with the constants of a generation.

    A precision that the GPU lacks runs at the rate of the next wider one; one without a published best matmul gets the
    generation's share of its peak. An unknown generation gets the constants of the nearest one.
    """
    matrix = _section("matrix", generation)
    peak: dict[str, float] = {}
    reached: dict[str, float] = {}
    for precision, names in RATE_NAMES.items():
        name = next((name for name in names if flops.get(name)), None)
        if name is None:
            continue
        bits = {"fp8": 8, "fp4": 4}.get(name, 16)
        best = achievable_flops.get(name) or flops[name] * matrix[f"achievable_{bits}"]
        peak[precision] = flops[name]
        reached[precision] = best * matrix[f"level_{bits}"]
        if precision == "mxfp8" and name == "fp8":
            reached[precision] *= matrix["block_level"]
    return GpuRates(
        generation=generation,
        peak_flops=peak,
        matrix_flops=reached,
        memory_bytes_per_second=memory_bytes_per_second,
        streaming_bytes_per_second=memory_bytes_per_second * matrix["memory_efficiency"],
        elementwise_bytes_per_second=memory_bytes_per_second
        * matrix["memory_efficiency"]
        * matrix["elementwise_level"],
        kernel_launch_seconds=matrix["launch_seconds"],
        output_passes=matrix["output_passes"],
        step_seconds=matrix["step_seconds"],
        grouped_level=matrix["grouped_level"],
        grouped_memory=matrix["grouped_memory"],
        attention={kernel: _attention_rates(kernel, generation) for kernel in ("best", "flash2")},
        cpu=cpu,
        operation_seconds=operation_seconds,
    )


def gemm_seconds(m: float, n: float, k: float, precision: str, gpu: GpuRates, groups: float = 1) -> float:
    """[m, k] × [k, n] → [m, n], `groups` of them in one batched launch; casting the operands is not included."""
    multiply = 2.0 * m * n * k / gpu.matrix_flops[precision]
    read = OPERAND_BYTES[precision] * (m + n) * k / gpu.streaming_bytes_per_second
    write = OUTPUT_BYTES[precision] * gpu.output_passes * m * n / gpu.streaming_bytes_per_second
    return gpu.kernel_launch_seconds + gpu.step_seconds * k + groups * (max(multiply, read) + write)


def grouped_gemm_seconds(
    m: float, n: float, k: float, groups: float, precision: str, gpu: GpuRates, imbalance: float = 1.0
) -> float:
    """Time of `groups` experts with m rows each on average; `imbalance`: rows of the busiest rank over the average."""
    rows = m * imbalance
    multiply = 2.0 * max(rows, MIN_GROUP_ROWS) * n * k / (gpu.matrix_flops[precision] * gpu.grouped_level)
    read = OPERAND_BYTES[precision] * (rows + n) * k / (gpu.streaming_bytes_per_second * gpu.grouped_memory)
    write = OUTPUT_BYTES[precision] * gpu.output_passes * rows * n / gpu.streaming_bytes_per_second
    return gpu.kernel_launch_seconds + gpu.step_seconds * k + groups * (max(multiply, read) + write)


def attention_seconds(
    batch: float,
    query_tokens: float,
    key_tokens: float,
    heads: float,
    kv_heads: float,
    head_dim: float,
    gpu: GpuRates,
    *,
    causal: bool = True,
    backward: bool = False,
    value_dim: float = 0,
    precision: str = "bf16",
    kernel: AttentionKernel = "best",
) -> float:
    """Time of fused attention over a whole sequence (training, prefill), or of its backward pass alone.

    Causal: the average query attends to half of `key_tokens`, also with a balanced share of the queries in context
    parallelism. MLA has head_dim 192 and value_dim 128.
    """
    rates = gpu.attention[kernel]
    width = head_dim + (value_dim or head_dim)
    products = 5.0 if backward else 2.0  # backward recomputes the scores and has four gradients
    unit = "fp32" if precision == "fp32" else "bf16"
    flops = gpu.peak_flops[unit] * rates.efficiency(0.5 * width, backward)
    if precision in ("fp8", "mxfp8", "nvfp4"):
        flops *= rates.fp8_gain
    extra = rates.extra_keys_backward if backward else rates.extra_keys_forward
    keys = 0.5 * key_tokens + extra if causal else key_tokens + 0.5 * extra
    scores = batch * heads * query_tokens * keys
    longest = rates.longest_tile * rates.multiprocessors * min(TILE_ROWS, query_tokens) * key_tokens
    moved = 2.0 * (1.5 * products - 2.0) * batch * width * (query_tokens * heads + key_tokens * kv_heads)
    memory = moved / gpu.streaming_bytes_per_second
    work = (scores + longest) * flops_per_score(head_dim, value_dim or head_dim, backward=backward)
    return rates.launch_seconds + max(work / flops, memory)


def flops_per_score(query_dim: float, value_dim: float, *, backward: bool) -> float:
    """Forward: scores and values. Backward: scores again, gradients of queries, keys, probabilities and values."""
    return 2.0 * (3.0 * query_dim + 2.0 * value_dim) if backward else 2.0 * (query_dim + value_dim)


def elementwise_seconds(read_bytes: float, written_bytes: float, gpu: GpuRates, kernels: float = 1) -> float:
    """Time of memory-bound kernels: norms, activations, residual adds, casts, optimizer steps."""
    return kernels * gpu.kernel_launch_seconds + (read_bytes + written_bytes) / gpu.streaming_bytes_per_second


def _attention_rates(kernel: str, generation: str) -> AttentionRates:
    table = "flash2" if kernel == "flash2" and _nearest(generation) in _tables()["flash2"] else "attention"
    constants = _section(table, generation)
    return AttentionRates(**{field.name: constants[field.name] for field in fields(AttentionRates)})


def _section(table: str, generation: str) -> dict[str, float]:
    return _tables()[table][_nearest(generation)]


def _nearest(generation: str) -> str:
    if generation in ("cpu", "hopper", "blackwell"):
        return generation
    if generation.startswith("blackwell"):
        return "blackwell"
    return "ampere" if generation in ("ampere", "ada") else "hopper"


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, dict[str, float]]]:
    loaded = tomllib.loads(resources.files(__package__).joinpath("kernels.toml").read_text())
    return {
        table: {
            name: {key: float(value) for key, value in entry.items() if key != "source"}
            for name, entry in sections.items()
        }
        for table, sections in loaded.items()
    }
