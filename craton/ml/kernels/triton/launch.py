"""Triton: kernels that start while the previous one still runs (programmatic dependent launch, Hopper and later).

Such a kernel calls `wait_for_inputs` before it reads the output of the directly preceding kernel, and before it writes
anything. Only after that call may the next kernel start. So when a kernel runs, all kernels but its direct predecessor
are done: it may read weights and earlier results without waiting.

A short kernel may call `start_next` before its `wait_for_inputs`, so that a launch in a chain of kernels costs less.
Then the next kernel may still run beside the last two: before it waits, it may read only weights and what is older.

At least one program of every kernel must wait, even if none has work: a kernel that ends sooner would let the next one
run beside kernels for which nothing has waited.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_next(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


def launch_options(tensor: Tensor) -> dict[str, Any]:
    """Return the launch options for a kernel that calls `wait_for_inputs(EARLY)`."""
    early = tensor.is_cuda and _starts_early(tensor.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number elsewhere, where the interpreter runs a kernel's programs in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def request_bound(requests: int) -> int:
    """Return the power of two for which a kernel that scans all requests is compiled. Few values, so a server compiles
    few kernels."""
    return next((bound for bound in (32, 256) if requests <= bound), triton.next_power_of_2(requests))


@cache
def _starts_early(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
