"""Distribute a model over ranks: build the device meshes, and apply the parallelisms in order.

The mesh has the dimensions of the layout, pp · replicate · fsdp · cp · tp, tp innermost. `replicate` copies. FSDP2
shards over fsdp · cp together, because the ranks of a context group hold the same weights. tp shards weights before
FSDP2 does. Experts have a separate mesh: ep takes ranks of replicate · fsdp · cp, and FSDP2 shards an expert over the
rest of fsdp · cp · tp. Gradients are sums over ranks, never means: the loss is divided by the global weight of its
labels. A single rank is not wrapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from craton.errors import CratonError
from craton.job.layout import Layout, num_lanes, stage_layers
from craton.ml.collectives import ALONE, Connections, Peers
from craton.ml.kernels import ATTENTION_OPERATIONS, keeping
from craton.ml.models import Decoder, Experts, LatentAttention, Stage, cut_experts
from craton.ml.precisions import TRAINED_PRECISIONS
from craton.ml.training.parallel.ranks import Meshes, Ranks
from craton.ml.training.parallel.tensor import cut_parameters

# Kept by selective activation checkpointing: matmuls, attention and reductions over ranks, which cost the most time to
# recompute for the memory of their outputs.
KEPT_OPERATIONS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_grouped_mm",
    *ATTENTION_OPERATIONS,
    "_c10d_functional::reduce_scatter_tensor",
)


class ParallelError(CratonError):
    """The layout needs a feature that is not implemented, or a different number of ranks than were started."""


def make_ranks(layout: Layout, device: torch.device, rank: int, world: int) -> Ranks:
    """Build the meshes of a layout; with more than one rank the process group must exist."""
    if layout.world != world:
        raise ParallelError(f"the layout needs {layout.world} ranks ({layout}), but {world} were started")
    if layout.precision not in TRAINED_PRECISIONS:
        raise ParallelError(
            f"precision {layout.precision} can be planned but not trained yet; allowed: {', '.join(TRAINED_PRECISIONS)}"
        )
    if layout.offload != "none":
        raise ParallelError(f"offload {layout.offload} can be planned but not trained yet; write offload: none")
    if world == 1:
        return Ranks(layout, device, rank)
    pp, replicate, shard, tp, ep = layout.pp, layout.replicate, layout.fsdp * layout.cp, layout.tp, layout.ep
    everyone = torch.arange(world)
    weights = _mesh(device, everyone.view(pp, replicate, shard, tp), ("pp", "replicate", "shard", "tp"))
    experts = None
    if ep > 1 or tp > 1:  # experts are not sharded by tp, so FSDP2 shards them over its ranks too
        copies, left = (replicate, shard // ep) if ep <= shard else (replicate * shard // ep, 1)
        if copies * left * ep != replicate * shard:
            raise ParallelError(f"ep {ep} and fsdp · cp = {shard}: one of them must divide the other")
        of_experts = everyone.view(pp, copies, left, ep, tp).transpose(3, 4).reshape(pp, copies, left * tp, ep)
        experts = _mesh(device, of_experts, ("pp", "replicate", "shard", "ep"))
    context = rows = stage = None
    if layout.cp > 1:
        context = _peers(everyone.view(-1, layout.cp, tp).transpose(1, 2).reshape(-1, layout.cp), rank)
    if layout.cp * tp > 1:
        rows = _peers(everyone.view(-1, layout.cp * tp), rank)
    stage = _peers(everyone.view(pp, -1), rank) if world > pp else None
    connections = Connections(
        tensor=Peers(weights.get_group("tp")) if tp > 1 else None,
        context=context,
        experts=Peers(experts.get_group("ep")) if experts is not None and ep > 1 else None,
        rows=rows,
        stage=stage,
    )
    meshes = Meshes(weights, experts)
    if pp == 1:
        return Ranks(layout, device, rank, meshes, connections)
    pipelines, numbers = everyone.view(pp, -1).t(), range(num_lanes(pp, layout.vpp))
    lanes = tuple(tuple(_peers(pipelines, rank) for _ in numbers) for _ in ("forward", "backward"))
    return Ranks(layout, device, rank, meshes, connections, Peers(weights.get_group("pp")), lanes)


def _mesh(device: torch.device, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    kept = [axis for axis, size in enumerate(ranks.shape) if size > 1 or names[axis] == "shard"]
    sizes = [ranks.shape[axis] for axis in kept]
    return DeviceMesh(device.type, ranks.view(sizes), mesh_dim_names=tuple(names[axis] for axis in kept))


def _peers(groups: Tensor, rank: int) -> Peers:
    """Return the row of `groups` that contains this rank, as a process group. All ranks create all groups, in the same
    order."""
    own = None
    for members in groups.tolist():
        group = dist.new_group(members)
        if rank in members:
            own = Peers(group)
    assert own is not None
    return own


def parameter_dtype(layout: Layout, weights: Literal["fp32", "bf16"]) -> torch.dtype:
    """Return the dtype of the parameters. FSDP keeps fp32 shards and gathers bf16; a single rank keeps bf16 parameters,
    and the optimizer their fp32 masters."""
    if layout.precision == "fp32":
        return torch.float32
    return torch.bfloat16 if weights == "bf16" or layout.world == 1 else torch.float32


def parallelize(model: nn.Module, ranks: Ranks, compile_blocks: bool) -> nn.Module:
    """Apply tensor, expert and pipeline parallelism, then activation checkpointing, then torch.compile per block, then
    FSDP."""
    if ranks.layout.pp * ranks.layout.cp * ranks.layout.tp * ranks.layout.ep > 1 and not isinstance(model, Decoder):
        raise ParallelError(
            f"the layout is {ranks.layout}; a model given as `module:function` supports only replicate and fsdp"
        )
    if ranks.pipeline is not None:
        _keep_stages(cast("Decoder", model), ranks.layout, ranks.place["pp"])
    talking: list[Any] = [module for module in model.modules() if hasattr(module, "connections")]
    for module in talking:
        module.connections = ranks.connections
    for module in talking:
        if isinstance(module, LatentAttention) and ranks.connections.context is not None:
            module.kv_b.connections = ALONE  # its input is already gathered over cp · tp
    if ranks.layout.tp > 1 and ranks.meshes is not None:
        cut_parameters(model, ranks.meshes.weights["tp"])
    if ranks.layout.ep > 1 and ranks.meshes is not None and ranks.meshes.experts is not None:
        cut_experts(model, ranks.meshes.experts["ep"])
    blocks = list(cast("nn.ModuleList", model.blocks))
    for block in blocks:
        _recompute(block, ranks.layout.recompute)
    if compile_blocks:
        for experts in (module for module in model.modules() if isinstance(module, Experts)):
            experts.prepare_to_compile()
        for block in blocks:
            # Only the forward method, so that FSDP's hooks are not compiled.
            block.forward = torch.compile(block.forward, dynamic=False)
    if ranks.meshes is not None:
        _shard(model, blocks, ranks.layout, ranks.meshes)
    return model


def _keep_stages(model: Decoder, layout: Layout, rank: int) -> None:
    layers, pp, vpp = model.config.shape.layers, layout.pp, layout.vpp
    if pp * vpp > layers:
        raise ParallelError(f"pp {pp} · vpp {vpp} = {pp * vpp} stages, but the model has {layers} layers; use fewer")
    stages = stage_layers(layers, pp, vpp)
    model.keep_stages(
        [Stage(stages[item], item == 0, item == len(stages) - 1) for item in range(rank, len(stages), pp)]
    )


def accumulate_gradients(model: nn.Module, layout: Layout, last: bool) -> None:
    """Prepare gradient accumulation before each micro-batch: what is reduced after it, and what stays gathered."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    sharded = layout.fsdp * layout.cp > 1
    if not sharded or layout.zero == 1:  # every rank holds whole gradients: reduce them once
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)  # over replicas once; over shards each time, to keep only a shard
    # Embedding and head are gathered from the start of a forward pass to the end of its backward pass, so they may also
    # stay gathered between micro-batches.
    model.set_reshard_after_backward(last, recurse=layout.zero < 3 or not sharded)


def _shard(model: nn.Module, blocks: list[nn.Module], layout: Layout, meshes: Meshes) -> None:
    low = layout.precision != "fp32"
    # Inputs are not cast: embeddings are already bf16, and rotary tables must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    # A block with experts returns a view; it is never modified in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning)
    mesh = _shard_mesh(meshes.weights)
    keep_sharded = layout.zero == 3 and layout.fsdp * layout.cp > 1 and layout.pp == 1
    cut_of_block = partial(_expert_cut, 1, mesh["shard"].size())
    for block in blocks:
        if meshes.experts is not None:
            of_experts = _shard_mesh(meshes.experts)
            cut = partial(_expert_cut, layout.ep, of_experts["shard"].size())
            for experts in (module for module in block.modules() if isinstance(module, Experts)):
                fully_shard(
                    experts,
                    mesh=of_experts,
                    mp_policy=policy,
                    reshard_after_forward=keep_sharded,
                    shard_placement_fn=cut,
                )
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=keep_sharded, shard_placement_fn=cut_of_block
        )
    # The head runs after the model's forward and uses the root's parameters: they stay gathered until the backward.
    cut_of_root = partial(_root_cut, mesh["shard"].size())
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=cut_of_root)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if layout.pp > 1:
                # Weights stay gathered, and the order of the last forward passes does not predict the next one. A
                # module set to prefetch itself prefetches nothing.
                module.set_modules_to_backward_prefetch([module])


def _expert_cut(ep: int, ranks: int, parameter: nn.Parameter) -> Shard:
    """Shard stacked experts by whole experts if every rank gets the same number, else within each expert along the
    first divisible axis; everything else by rows."""
    if parameter.ndim < 3:
        return Shard(0)
    experts, *inner = parameter.shape
    return next((Shard(axis) for axis, size in enumerate((experts // ep, *inner)) if size % ranks == 0), Shard(0))


def _root_cut(ranks: int, parameter: nn.Parameter) -> Shard:
    """Shard by rows, a scalar head by columns: it has one row, and most ranks would hold nothing of it."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] == 1 and parameter.shape[1] % ranks == 0 else Shard(0)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def _recompute(block: nn.Module, recompute: str) -> None:
    if recompute == "none":
        return
    contexts: dict[str, Any] = {"context_fn": keeping(KEPT_OPERATIONS)} if recompute == "selective" else {}
    # Blocks use no random numbers, so there is no random state to save.
    forward: Callable[..., Any] = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
    )
    block.forward = forward
