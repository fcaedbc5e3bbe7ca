"""Tensor parallelism of a model's parameters, and the reduction of the gradients it leaves replicated.

Every module declares which dimension of its parameters is sharded. Other parameters are replicated on every rank of the
group. Each rank computes their gradient for its own tokens or heads only; these shares are summed once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from craton.errors import CratonError
from craton.ml.collectives import local
from craton.ml.models import Attention, Experts, LatentAttention
from craton.ml.training.parallel.ranks import Ranks

DIMENSION = "tp"


class CutError(CratonError):
    """The model cannot be sharded over this many ranks."""


def cut_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace all parameters by this rank's parts, as DTensors on the tp mesh, in place. Routed experts stay whole:
    they receive shares of the tokens. Works on the meta device and on real memory."""
    size, rank = mesh.size(), mesh.get_local_rank()
    for name, module in model.named_modules():
        _check_heads(name, module, size)
        if isinstance(module, Experts):
            continue
        cuts: dict[str, int] = getattr(module, "tensor_cuts", {})
        for own, parameter in list(module.named_parameters(recurse=False)):
            part: Tensor = parameter.detach()
            placement: Placement = Replicate()
            if own in cuts:
                multiple = getattr(module, "part_multiple", 1)
                part = _part(f"{name}.{own}", parameter, cuts[own], multiple, rank, size)
                placement = Shard(cuts[own])
            _replace(module, own, part, mesh, placement)


@torch.no_grad()
def sum_uncut_gradients(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Sum the gradients of replicated parameters over the tensor-parallel group, in fp32 and in one all-reduce."""
    peers = ranks.connections.tensor
    if peers is None:
        return
    shares = [local(parameter.grad) for parameter in parameters if parameter.grad is not None and _is_uncut(parameter)]
    if not shares:
        return
    total = peers.sum(torch.cat([share.flatten().float() for share in shares]))
    for share, summed in zip(shares, total.split([share.numel() for share in shares]), strict=True):
        share.copy_(summed.view_as(share))


def _is_uncut(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return DIMENSION in names and parameter.placements[names.index(DIMENSION)].is_replicate()


def _check_heads(name: str, module: nn.Module, size: int) -> None:
    if isinstance(module, Attention):
        kinds = {"query heads": module.heads, "key/value heads": module.kv_heads}
    elif isinstance(module, LatentAttention):
        kinds = {"heads": module.heads}
    else:
        return
    for kind, count in kinds.items():
        if count % size:
            raise CutError(f"tp {size} does not divide the {count} {kind} of {name}; use another tp")


def _part(name: str, parameter: Tensor, dimension: int, multiple: int, rank: int, size: int) -> Tensor:
    if parameter.shape[dimension] % (size * multiple):
        parts = f"{size} parts" if multiple == 1 else f"{size} parts that are multiples of {multiple} (for fp8)"
        raise CutError(
            f"tp {size}: {name} is {' × '.join(map(str, parameter.shape))}, which cannot be split into {parts} in "
            f"dimension {dimension}; use a smaller tp, or change the model"
        )
    return parameter.detach().chunk(size, dimension)[rank].clone(memory_format=torch.contiguous_format)


def _replace(module: nn.Module, name: str, part: Tensor, mesh: DeviceMesh, placement: Placement) -> None:
    trained = getattr(module, name).requires_grad
    distributed = DTensor.from_local(part, mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(distributed, requires_grad=trained))
