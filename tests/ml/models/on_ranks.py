"""What the ranks of a gang run in the tests of weights; apart from them, so that no rank imports transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from craton.ml.models import Decoder, config_from_huggingface, load_weights


def load_sharded(folder: str, replicas: int) -> dict[str, Tensor]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "fsdp"))
    with torch.device("meta"):
        model = Decoder(config_from_huggingface(folder))
    for block in model.blocks:
        fully_shard(block, mesh=mesh if replicas > 1 else mesh["fsdp"])
    fully_shard(model, mesh=mesh if replicas > 1 else mesh["fsdp"])
    model.to_empty(device="cpu")
    load_weights(model, folder)
    state = {name: value.full_tensor() for name, value in model.named_parameters()}
    saved = model.state_dict().keys()
    return state | {name: value for name, value in model.named_buffers() if name in saved}


def load_cut_by_columns(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    model = Decoder(config_from_huggingface(folder))
    whole = Decoder(config_from_huggingface(folder))
    load_weights(whole, folder)

    def cut(_: str, module: torch.nn.Module, device_mesh: DeviceMesh) -> None:
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(1)]))

    distribute_module(model.blocks[0].attention.output, mesh, cut)
    load_weights(model, folder)
    got = model.blocks[0].attention.output.weight
    assert isinstance(got, DTensor)
    return torch.equal(got.full_tensor(), whole.blocks[0].attention.output.weight)
