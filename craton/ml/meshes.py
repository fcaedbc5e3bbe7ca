"""What PyTorch keeps of the device meshes of a process group beyond the end of that group.

DTensor caches the results of operations, with their meshes. Meshes are equal if they have the same ranks, shape and
names, whichever rank this process has in them. A process that enters another group under another rank would so find
results of the old group, and take the shard of its old rank for its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, _redistribute


def forget_meshes() -> None:
    """Empty the caches of DTensor; call it after leaving a process group. Each thread has its own: where a GPU is in
    use, also those of the thread that runs backward passes on it."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in all versions of PyTorch
        _redistribute.clear_redistribute_planner_cache()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        _InBackward.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()


def _clear_sharding_prop_cache() -> None:
    """As the function of this name in torch.distributed.tensor.debug, which imports torch's compilers: seconds."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # not in all versions of PyTorch
        torch._C._clear_DTensor_sharding_propagator_cache()


class _InBackward(torch.autograd.Function):
    """Empties the caches of the thread in which its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _clear_sharding_prop_cache()
        return gradient
