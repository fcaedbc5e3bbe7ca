"""Triton: kernels that are set up while the one before them still runs (programmatic dependent launch, from Hopper on).

A kernel so launched calls `wait_for_inputs` before it reads what the kernel directly before it wrote, and before it
writes anything. It lets the next kernel begin after that call, so whatever has begun knows that all but its direct
forerunner are done: weights, and what a step computed earlier, it may read without waiting.
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


def launch_options(tensor: Tensor) -> dict[str, Any]:
    """Arguments for the launch of a kernel that calls `wait_for_inputs(EARLY)`."""
    early = tensor.is_cuda and _starts_early(tensor.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere, where the interpreter runs a kernel's programs in turn, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def request_bound(requests: int) -> int:
    """The power of two that a kernel which looks through all requests is compiled for: few of them, so that a server
    has few kernels to compile."""
    return next((bound for bound in (32, 256) if requests <= bound), triton.next_power_of_2(requests))


@cache
def _starts_early(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
