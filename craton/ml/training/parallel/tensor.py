"""What tensor parallelism makes of a model's parameters, and what it leaves to be done with their gradients.

Every module says which dimension of its parameters is cut. What is not cut is held by every rank of the group, and each
finds the gradient of its own tokens or heads only: those shares are summed once a step.
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
    """The model cannot be cut into as many parts as there are ranks."""


def cut_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes this rank's parts of all parameters DTensors on the mesh of tp, in place. Routed experts stay as they are:
    tokens come to them in shares. Works without memory (on the meta device) and with."""
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
    """Adds up what each rank of the tensor group found for the parameters that all of them hold; fp32, one sum."""
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
            raise CutError(f"tp {size} does not divide the {count} {kind} of {name}; use a tp that does")


def _part(name: str, parameter: Tensor, dimension: int, multiple: int, rank: int, size: int) -> Tensor:
    if parameter.shape[dimension] % (size * multiple):
        parts = f"{size} parts" if multiple == 1 else f"{size} parts of a multiple of {multiple}, which fp8 needs"
        raise CutError(
            f"tp {size}: {name} is {' × '.join(map(str, parameter.shape))}, which cannot be cut into {parts} in "
            f"dimension {dimension}; use a smaller tp, or change the model's sizes"
        )
    return parameter.detach().chunk(size, dimension)[rank].clone(memory_format=torch.contiguous_format)


def _replace(module: nn.Module, name: str, part: Tensor, mesh: DeviceMesh, placement: Placement) -> None:
    trained = getattr(module, name).requires_grad
    distributed = DTensor.from_local(part, mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(distributed, requires_grad=trained))
