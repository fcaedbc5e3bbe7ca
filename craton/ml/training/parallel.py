"""How a model is spread over ranks: one device mesh, and the order in which a model is made parallel.

The mesh has the dimensions of the layout algebra, pp · replicate · fsdp · cp · tp, tp innermost. `replicate` copies and
`fsdp` shards (both > 1: HSDP); the others have their place here and are refused until they are built. A single rank is
left unwrapped. Gradients are sums over ranks, never means: the loss is divided by the global weight of its labels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from craton.errors import CratonError
from craton.job import Layout
from craton.ml import TRAINED_PRECISIONS, UNTRAINED_DIMENSIONS

DIMENSIONS = ("pp", "replicate", "fsdp", "cp", "tp")

# What selective recompute keeps: products and attention cost the most time for the memory of their outputs.
KEPT_OPERATIONS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)


class ParallelError(CratonError):
    """The layout asks for what this version does not build, or for another number of ranks than there are."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the layout."""

    layout: Layout
    device: torch.device
    rank: int
    mesh: DeviceMesh | None  # None: one rank, no process group

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def data_rank(self) -> int:
        """Which of the ranks that see different samples this one is."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("replicate") * self.layout.fsdp + self.mesh.get_local_rank("fsdp")

    @property
    def data_world(self) -> int:
        return self.layout.data_parallel

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that see different samples, in place and on the device."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor


def make_ranks(layout: Layout, device: torch.device, rank: int, world: int) -> Ranks:
    """The mesh of a layout; the process group must exist when there is more than one rank."""
    unbuilt = [f"{name} {getattr(layout, name)}" for name in UNTRAINED_DIMENSIONS if getattr(layout, name) > 1]
    if unbuilt:
        raise ParallelError(
            f"the layout has {', '.join(unbuilt)}, which can be planned but not trained yet; allowed: replicate and "
            "fsdp (write layout: {fsdp: N})"
        )
    if layout.world != world:
        raise ParallelError(f"the layout takes {layout.world} ranks ({layout}), but {world} were started")
    if layout.precision not in TRAINED_PRECISIONS:
        raise ParallelError(
            f"precision {layout.precision} can be planned but not trained yet; allowed: {', '.join(TRAINED_PRECISIONS)}"
        )
    if layout.offload != "none":
        raise ParallelError(f"offload {layout.offload} can be planned but not trained yet; write offload: none")
    sizes = tuple(getattr(layout, name) for name in DIMENSIONS)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS) if world > 1 else None
    return Ranks(layout, device, rank, mesh)


def parameter_dtype(layout: Layout, weights: Literal["fp32", "bf16"]) -> torch.dtype:
    """What parameters are kept in. FSDP keeps fp32 shards and gathers bf16; a single rank keeps bf16 parameters and
    the optimizer their fp32 masters."""
    if layout.precision == "fp32":
        return torch.float32
    return torch.bfloat16 if weights == "bf16" or layout.world == 1 else torch.float32


def parallelize(model: nn.Module, ranks: Ranks, compile_blocks: bool) -> nn.Module:
    """Tensor parallelism (its place is here), then recompute, then compilation per block, then FSDP."""
    blocks = list(cast("nn.ModuleList", model.blocks))
    for block in blocks:
        _recompute(block, ranks.layout.recompute)
    if compile_blocks:
        for block in blocks:
            # The forward alone, so that FSDP's hooks stay outside of what is traced.
            block.forward = torch.compile(block.forward, dynamic=False)
    if ranks.mesh is not None:
        _shard(model, blocks, ranks)
    return model


def accumulate_gradients(model: nn.Module, layout: Layout, last: bool) -> None:
    """Called before each micro-batch: what is reduced after it, and what stays gathered until the next."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if layout.fsdp == 1 or layout.zero == 1:  # gradients are whole on every rank: reduced once
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)  # over replicas once; over shards each time, to keep only a shard
    if layout.zero < 3 or layout.fsdp == 1:
        model.set_reshard_after_backward(last)


def _shard(model: nn.Module, blocks: list[nn.Module], ranks: Ranks) -> None:
    assert ranks.mesh is not None
    layout = ranks.layout
    mesh = ranks.mesh["replicate", "fsdp"] if layout.replicate > 1 else ranks.mesh["fsdp"]
    low = layout.precision != "fp32"
    # Inputs are not cast: embeddings are bf16 already, and rotary tables must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    keep_sharded = layout.zero == 3 and layout.fsdp > 1
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=keep_sharded)
    # The head runs after the model's forward and reads the root's parameters: they stay gathered until the backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _recompute(block: nn.Module, recompute: str) -> None:
    if recompute == "none":
        return
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if recompute == "selective" else {}
    # Nothing in a block is random, so there is no random state to keep.
    forward: Callable[..., Any] = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
    )
    block.forward = forward


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_keep)  # type: ignore[no-any-return]


def _keep(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    name = operation.name() if hasattr(operation, "name") else str(operation)
    kept = name.partition(".")[0] in KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
