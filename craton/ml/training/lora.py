"""LoRA: low-rank adapters (arXiv:2106.09685), W + (alpha / rank) · B · A; only A and B are trained and saved.

An adapted layer keeps the name of its weight and adds `lora_a` and `lora_b` beside it, so published weights load as
usual and a checkpoint of the trained parameters is small. The fused query-key-value projection has one adapter; stacked
routed experts have none and stay frozen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.job.sections import Lora
from craton.ml.collectives import ALONE, gather, local, own_part, scatter_sum
from craton.ml.kernels import gated_linears, linear, linears
from craton.ml.models import Linear, LowRank, Mlp, fill_normal

TARGETS = {
    "attention": ("qkv", "output", "q", "q_a", "q_b", "kv_a", "kv_b"),
    "mlp": ("gate", "up", "down"),
}


class LoraError(CratonError):
    """The model has no layers that can take adapters."""


class LoraLinear(Linear):
    """A linear layer with a frozen weight. With tensor parallelism only the narrow tensor between A and B is gathered
    or summed."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.in_features, self.out_features = base.in_features, base.out_features
        self.cut, self.connections = base.cut if isinstance(base, Linear) else None, ALONE
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    @property
    def tensor_cuts(self) -> dict[str, int]:
        return super().tensor_cuts | {0: {"lora_b": 0}, 1: {"lora_a": 1}, None: {}}[self.cut]

    def adapt(self, out: Tensor, x: Tensor) -> Tensor:
        narrow = linear(x, self.lora_a)
        if self.peers is not None:
            narrow = (gather if self.cut == 0 else scatter_sum)(narrow, self.peers)
        return self.join(out, narrow)

    def join(self, out: Tensor, narrow: Tensor) -> Tensor:
        """Add the adapter's output to that of the frozen weight."""
        return out + self.scale * linear(narrow, self.lora_b)

    @property
    def low_rank(self) -> LowRank:
        return LowRank(own_part(self.lora_a), self.scale * own_part(self.lora_b))

    def merged(self) -> Tensor:
        """Return the weight of a plain layer with the same output."""
        product = self.scale * self.lora_b.float() @ self.lora_a.float()
        return (self.weight.float() + product).to(self.weight.dtype)


class LoraMlp(Mlp):
    """The gated MLP with adapters on all three layers. Like the plain one it keeps its input, gate and up."""

    gate: LoraLinear
    up: LoraLinear
    down: LoraLinear

    def forward(self, x: Tensor) -> Tensor:
        peers = self.connections.tensor
        gated, lifted = linears(x, (self.gate.weight, self.up.weight), peers)
        gated, lifted = self.gate.adapt(gated, x), self.up.adapt(lifted, x)
        out, narrow = gated_linears(gated, lifted, (self.down.weight, self.down.lora_a))
        if peers is not None:
            out, narrow = scatter_sum(out, peers), scatter_sum(narrow, peers)
        return self.down.join(out, narrow)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze the model and add adapters to the linear layers of its blocks that the job names. A scalar head is trained
    whole: it starts at zero, so it has nothing to adapt."""
    names = {name for target, group in TARGETS.items() if lora.targets in (target, "all") for name in group}
    model.requires_grad_(False)
    if isinstance(score := getattr(model, "score", None), nn.Module):
        score.requires_grad_(True)
    scale = (lora.alpha or lora.rank) / lora.rank
    adapted = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear) and type(child) in (nn.Linear, Linear):
                setattr(parent, name, LoraLinear(child, lora.rank, scale))
                adapted += 1
        if isinstance(parent, Mlp) and isinstance(parent.down, LoraLinear):
            parent.__class__ = LoraMlp
    if not adapted:
        raise LoraError(
            f"train.lora targets {lora.targets}, but the model has no linear layer named {', '.join(sorted(names))}"
        )


@contextmanager
def base_only(model: nn.Module) -> Iterator[None]:
    """Hide the adapters inside the context, so that the base model can be initialized or loaded as usual."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    taken = [{name: module._parameters.pop(name) for name in ("lora_a", "lora_b")} for module in adapted]
    try:
        yield
    finally:
        for module, parameters in zip(adapted, taken, strict=True):
            module._parameters.update(parameters)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute as the base model does inside the context; the adapters keep their values."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    scales = [module.scale for module in adapted]
    try:
        for module in adapted:
            module.scale = 0.0
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.scale = scale


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """A normal, B zero: training starts from the model as it was."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):  # seeded by name, which does not depend on the layers that a rank holds
            fill_normal(module.lora_a, module.lora_a.shape[1] ** -0.5, seed * 1_000_003 + zlib.crc32(name.encode()))
            local(module.lora_b).zero_()


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Restore plain layers, with the adapters merged into their weights. The model must not be sharded."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                with torch.device("meta"):
                    plain = Linear(child.in_features, child.out_features, child.bias is not None, child.cut)
                plain.weight = nn.Parameter(child.merged())
                plain.bias = child.bias
                setattr(parent, name, plain)
        if isinstance(parent, LoraMlp):
            parent.__class__ = Mlp  # type: ignore[assignment]
