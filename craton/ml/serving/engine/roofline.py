"""What this device reaches at best, measured when an engine starts: steps are held against it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from craton.planning.serving import Roofs

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
SIDE = {"cuda": 8192, "cpu": 512}
TRIES = 5


def measure_roofs(device: torch.device, dtype: torch.dtype) -> Roofs:
    """Bytes a second of a long copy, read and written, and FLOP/s of a large product; a fraction of a second."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best(lambda: target.copy_(source), device)
    side = SIDE[device.type]
    # random numbers: a GPU that multiplies zeros draws less power and is faster
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_seconds = _best(lambda: torch.mm(left, right, out=product), device)
    return Roofs(2 * source.numel() / copy_seconds, 2 * side**3 / product_seconds)


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
