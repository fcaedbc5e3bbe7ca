"""Find GPUs that compute wrong results: repeat seeded matmuls and attention, compare every result bit by bit with the
first one, and compare hashes of the first results across GPUs.

On one device model with one build of torch the results are reproducible: inputs come from a seed on the CPU, and only
kernels with a fixed order of summation run. Any difference comes from the hardware.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SEED = 20261115
GPU_SECONDS, CPU_SECONDS = 20.0, 1.0
BATCH_SECONDS = 0.25  # of work between two checks of the clock
CHECKED_ROWS = 8  # of a matmul, compared with an fp64 result from the CPU
FP8_CAPABILITY = (8, 9)
# Allowed difference from the fp64 result. Input rounding is in both results, output rounding is not.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass
class DeviceResult:
    """Result of one device."""

    device: str  # cuda:3 or cpu
    name: str
    torch: str
    cuda: str
    hashes: dict[str, str] = field(default_factory=dict)  # operation → sha256 of its result
    repeats: dict[str, int] = field(default_factory=dict)
    mismatches: dict[str, int] = field(default_factory=dict)  # repeats with a different result
    wrong: list[str] = field(default_factory=list)  # operations whose result is far from the CPU's
    tflops: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Operation:
    run: Callable[[], Tensor]
    flops: float
    reference: Callable[[], Tensor] | None = None  # the first rows, in fp64 on the CPU


def devices_here() -> list[torch.device]:
    """Return all GPUs that torch can use, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]


def check_devices(devices: Sequence[torch.device], seconds: float | None = None) -> Iterator[dict[str, Any]]:
    """Test all devices at the same time, as a run would load them; yield each result as soon as it is ready."""
    # cuBLAS sums in a fixed order only with its own workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    # Set once for all threads: torch keeps this setting per process.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        if devices[0].type == "cpu":
            torch.set_num_threads(1)  # the split of a sum over threads must not depend on how busy the machine is
            yield asdict(check_device(devices[0], seconds or CPU_SECONDS))
            return
        with ThreadPoolExecutor(len(devices)) as pool:
            tests = [pool.submit(check_device, device, seconds or GPU_SECONDS) for device in devices]
            for test in as_completed(tests):
                yield asdict(test.result())


def check_device(device: torch.device, seconds: float) -> DeviceResult:
    """Run every operation for its share of the time; a CUDA error becomes part of the result."""
    result = DeviceResult(str(device), "", torch.__version__, torch.version.cuda or "")
    begin = time.perf_counter()
    try:
        result.name = device_name(device)
        work = operations(device)
        for name, operation in work.items():
            _repeat(name, operation, device, seconds / len(work), result)
    except RuntimeError as error:  # CUDA errors, including out of memory
        result.error = str(error).strip().partition("\n")[0]
    result.seconds = time.perf_counter() - begin
    return result


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")


def operations(device: torch.device) -> dict[str, Operation]:
    """Return the matmuls in bf16, fp32 and, where the GPU supports it, fp8, and causal attention in bf16."""
    is_gpu = device.type == "cuda"
    wide, narrow = (4096, 2048) if is_gpu else (256, 192)
    result = {
        "matmul_bf16": _product(wide, torch.bfloat16, device),
        "matmul_fp32": _product(narrow, torch.float32, device),
        "attention_bf16": _attention(device, *((2, 16, 2048, 128) if is_gpu else (1, 4, 128, 64))),
    }
    if is_gpu and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        result["matmul_fp8"] = _scaled_product(wide, device)
    return result


def result_hash(result: Tensor) -> str:
    """Hash the bits, so that two NaNs are equal and 0 and -0 are not."""
    return hashlib.sha256(_bits(result).cpu().numpy().tobytes()).hexdigest()


def _repeat(name: str, operation: Operation, device: torch.device, seconds: float, result: DeviceResult) -> None:
    first = operation.run()
    _wait(device)
    result.hashes[name] = result_hash(first)
    if operation.reference is not None and not _is_near(first[:CHECKED_ROWS], operation.reference()):
        result.wrong.append(name)
    wanted = _bits(first)
    begin = time.perf_counter()
    operation.run()
    _wait(device)
    batch = max(1, min(1000, int(BATCH_SECONDS / max(time.perf_counter() - begin, 1e-6))))
    differing = torch.zeros((), dtype=torch.int64, device=device)
    repeats, spent, end = 0, 0.0, time.perf_counter() + seconds
    while not repeats or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(batch):
            differing += (_bits(operation.run()) != wanted).any()
        _wait(device)
        spent += time.perf_counter() - begin
        repeats += batch
    result.repeats[name] = repeats
    result.mismatches[name] = int(differing)
    result.tflops[name] = repeats * operation.flops / spent / 1e12


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Operation:
    left, right = _random(1, size, size).to(dtype), _random(2, size, size).to(dtype)
    on_left, on_right = left.to(device), right.to(device)
    return Operation(
        run=lambda: on_left @ on_right,
        flops=2.0 * size**3,
        reference=lambda: left[:CHECKED_ROWS].double() @ right.double(),
    )


def _scaled_product(size: int, device: torch.device) -> Operation:
    # The second operand is transposed: cuBLAS supports fp8 only for a row-major and a column-major matrix.
    left = _random(3, size, size).to(device).to(torch.float8_e4m3fn)
    right = _random(4, size, size).to(device).to(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=device)
    return Operation(
        run=lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16),
        flops=2.0 * size**3,
        reference=lambda: left[:CHECKED_ROWS].cpu().double() @ right.cpu().double().t(),
    )


def _attention(device: torch.device, batch: int, heads: int, length: int, width: int) -> Operation:
    query, key, value = (_random(seed, batch, heads, length, width).bfloat16().to(device) for seed in (5, 6, 7))

    return Operation(
        run=lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True),
        flops=2.0 * batch * heads * length**2 * width,
    )


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _is_near(computed: Tensor, wanted: Tensor) -> bool:
    scale = wanted.abs().max()
    error = (computed.cpu().double() - wanted).abs().max() / scale
    return bool(error <= TOLERANCE[computed.dtype])  # NaN is never near


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
