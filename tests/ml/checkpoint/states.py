"""States to save and restore, and how a test waits for what happens in the background."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from s3 import S3Server
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from waiting import wait_until

from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.ml.training.checkpoint.lane import SaveReport


def state(seed: int, sharded: bool, width: int = 33) -> dict[str, Tensor]:
    """Weights that do not divide evenly, a bf16 one, a scalar and one plain tensor, as a rank would hold them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 17), nn.Linear(17, 3, bias=False), nn.Embedding(7, width).bfloat16())
    buffers = {"model.bias": torch.randn(5), "optimizer.count": torch.tensor(float(seed))}
    if sharded:
        fully_shard(model[0])
        fully_shard(model[1])
        fully_shard(model[2])
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()} | buffers


def parallel_state(seed: int, layout: str) -> dict[str, Tensor]:
    """Four weights as ranks of different layouts hold them: `pp` gives each half of the ranks two of them."""
    torch.manual_seed(seed)
    full = {f"model.layer.{index}": torch.randn(13, 6) for index in range(4)}
    if layout == "one":
        return full
    rank, world = rank_and_world()
    if layout == "pp":
        half = rank // (world // 2)
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
        mine = [name for index, name in enumerate(full) if index // 2 == half]
        return {name: distribute_tensor(full[name], mesh, [Shard(0)], src_data_rank=None) for name in mine}
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if layout == "fsdp over tp":  # rows cut for tp first, and what is left for fsdp: a strided shard
        module = nn.ParameterDict(
            {name.removeprefix("model.").replace(".", "_"): value for name, value in full.items()}
        )
        for name, value in list(module.items()):
            module[name] = nn.Parameter(distribute_tensor(value.data, grid["inner"], [Shard(0)], src_data_rank=None))
        fully_shard(module, mesh=grid["outer"])
        return {f"model.{name.replace('_', '.')}": value for name, value in module.items()}
    placements: list[Placement] = {
        "fsdp·tp": [Shard(0), Shard(1)],
        "rows twice": [Shard(0), Shard(0)],
        "replicate·fsdp": [Replicate(), Shard(0)],
    }[layout]
    return {name: distribute_tensor(value, grid, placements, src_data_rank=None) for name, value in full.items()}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def tier_of(kind: str, place: Path | str, host: int, **options: Any) -> TierFolder:
    """`nvme` is the disk of one of several machines."""
    if kind == "nvme":
        return TierFolder("nvme", Path(place) / f"host-{host}", node=f"node-{host}", **options)
    return TierFolder(kind, place, **options)


def single(tiers: list[TierFolder]) -> Checkpointer:
    return Checkpointer(tiers, 0, 1)


def numbers(step: int) -> dict[str, Tensor]:
    return {"model.a": torch.full((64, 32), float(step)), "optimizer.exp_avg.a": torch.full((64, 32), -float(step))}


def equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


class Files:
    """The files of a step, to be harmed."""

    def __init__(self, tier: TierFolder, step: int, server: S3Server) -> None:
        self._server, self._bucket = server, ""
        if str(tier.path).startswith("s3://"):
            self._bucket, _, prefix = str(tier.path).removeprefix("s3://").partition("/")
            self.names = [key for key in server.objects(self._bucket) if key.startswith(f"{prefix}/step-{step:08d}/")]
        else:
            root = Path(tier.path)
            self.names = [str(path) for path in root.rglob(f"step-{step:08d}/*")]
        self.names.sort()

    def read(self, name: str) -> bytes:
        return self._server.read(self._bucket, name) if self._bucket else Path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        if self._bucket:
            self._server.replace(self._bucket, name, content)
        else:
            Path(name).write_bytes(content)


def wait_for_report(checkpointer: Checkpointer, step: int, tier: str = "shared") -> SaveReport:
    found: list[SaveReport] = []

    def is_there() -> bool:
        found.extend(checkpointer.reports())
        return any((report.step, report.tier) == (step, tier) for report in found)

    wait_until(is_there)
    wait_until(lambda: checkpointer._lanes[tier].outstanding == 0)
    return next(report for report in found if (report.step, report.tier) == (step, tier))
