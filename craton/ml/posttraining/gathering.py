"""Whole weights of a trained model in any layout: gathered one tensor at a time, on all ranks together.

A tensor is gathered over its owner's mesh, then sent to the other pipeline stages. Without a pipeline every rank is an
owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from craton.job.layout import stage_layers
from craton.job.sections import Lora
from craton.ml.models import Decoder
from craton.ml.serving.device import named_targets
from craton.ml.training import LoraLinear, add_adapters
from craton.ml.training.parallel import Ranks

BIAS = "router_bias"  # a buffer that training changes, too
ADAPTERS = (".lora_a", ".lora_b")


class TrainedWeights:
    """The weights of a trained model that its served form has, by their names: without a scalar head."""

    def __init__(self, model: Decoder, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self.dtype = torch.float32 if ranks.layout.precision == "fp32" else torch.bfloat16  # of the computation
        self.config = replace(model.config, heads="tokens")
        self.names = tuple(named_targets(self.new_twin()))

    def new_twin(self) -> Decoder:
        """Return the model as it is served, on the meta device, with the same adapters. All ranks call it together."""
        with torch.device("meta"):
            twin = Decoder(self.config)
        _add_same_adapters(twin, self._model, self._ranks)
        return twin

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's shards, not what FSDP has gathered."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        own = named_targets(self._model)
        return {name: own[name] for name in self.names if name in own}

    @torch.no_grad()
    def fill(self, targets: dict[str, Tensor]) -> None:
        """Fill whole tensors; all ranks give the same names in the same order."""
        shards = self.shards()
        for name, target in targets.items():
            self._fill(name, target, shards)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole tensor of the model without adapters, which are merged into their weights: for engines in
        other processes. All ranks read it together; on ranks that do not send, the tensors can be dropped."""
        twin, shards = self.new_twin(), self.shards()
        targets = named_targets(twin)

        def gathered(name: str) -> Tensor:
            dtype = torch.float32 if name.endswith(BIAS) else self.dtype
            whole = torch.empty(targets[name].shape, dtype=dtype, device=self._ranks.device)
            self._fill(name, whole, shards)
            return whole

        for name in targets:
            if name.endswith(ADAPTERS):
                continue
            whole, path = gathered(name), name.rpartition(".")[0]
            if f"{path}.lora_a" in targets and name.endswith(".weight"):
                layer = twin.get_submodule(path)
                assert isinstance(layer, LoraLinear)
                a, b = (gathered(f"{path}{own}").float() for own in ADAPTERS)
                whole = (whole.float() + layer.scale * b @ a).to(whole.dtype)
            yield name, whole

    def _fill(self, name: str, target: Tensor, shards: dict[str, Tensor]) -> None:
        stage = self._stage_of(name)
        if stage is None or stage == self._ranks.place["pp"]:
            shard = shards[name].detach().to(target.dtype)  # cast first, as FSDP does
            target.copy_(shard.full_tensor() if isinstance(shard, DTensor) else shard)
        if stage is not None:
            assert self._ranks.pipeline is not None
            # as bytes: gloo does not send every dtype
            dist.broadcast(target.view(torch.uint8), group=self._ranks.pipeline.group, group_src=stage)

    def _stage_of(self, name: str) -> int | None:
        """Return the pipeline rank that owns a tensor; None without a pipeline."""
        layout = self._ranks.layout
        if layout.pp == 1:
            return None
        stages = stage_layers(self.config.shape.layers, layout.pp, layout.vpp)
        first, *rest = name.split(".")
        if first == "blocks":
            return next(index for index, layers in enumerate(stages) if int(rest[0]) in layers) % layout.pp
        return 0 if first == "embedding" else layout.pp - 1


def _add_same_adapters(twin: Decoder, model: Decoder, ranks: Ranks) -> None:
    """Add adapters to the twin where the trained model has some. A pipeline stage may have none of its own, so the
    stages compare."""
    found = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # rank, scale, of attention, of MLPs
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            found[0], found[1], found[2 if ".attention." in name else 3] = module.lora_a.shape[0], module.scale, 1
    if ranks.pipeline is not None:
        found = ranks.pipeline.sum(found, "max")
    rank, scale, of_attention, of_mlps = found.tolist()
    if not rank:
        return
    targets = "all" if of_attention and of_mlps else "attention" if of_attention else "mlp"
    with torch.device("meta"):
        add_adapters(twin, Lora(rank=int(rank), targets=targets))
    for module in twin.modules():
        if isinstance(module, LoraLinear):
            module.scale = scale
