"""Low-rank adapters (arXiv:2106.09685): W + (alpha / rank) · B · A, only A and B trained and saved.

An adapted layer keeps the name of its weight and adds `lora_a` and `lora_b` beside it, so published weights load as
they always do and a checkpoint of the trained parameters is small. The fused query-key-value projection has one
adapter; the stacked experts of a mixture have none and stay frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from craton.errors import CratonError
from craton.job import Lora
from craton.ml.models.decoder import fill_normal

TARGETS = {
    "attention": ("qkv", "output", "q", "q_a", "q_b", "kv_a", "kv_b"),
    "mlp": ("gate", "up", "down"),
}


class LoraError(CratonError):
    """There is nothing in the model that adapters could be put on."""


class LoraLinear(nn.Module):
    """A linear layer whose own weight is frozen."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) + self.scale * linear(linear(x, self.lora_a), self.lora_b)

    def merged(self) -> Tensor:
        """The weight of a plain layer that computes the same."""
        product = self.scale * self.lora_b.float() @ self.lora_a.float()
        return (self.weight.float() + product).to(self.weight.dtype)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freezes the model and adapts the linear layers of its blocks that the job names."""
    names = {name for target, group in TARGETS.items() if lora.targets in (target, "all") for name in group}
    model.requires_grad_(False)
    scale = (lora.alpha or lora.rank) / lora.rank
    adapted = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and type(child) is nn.Linear:
                setattr(parent, name, LoraLinear(child, lora.rank, scale))
                adapted += 1
    if not adapted:
        raise LoraError(
            f"train.lora targets {lora.targets}, but the model has no linear layer named {', '.join(sorted(names))}"
        )


@contextmanager
def base_only(model: nn.Module) -> Iterator[None]:
    """Inside, the model has the parameters it would have without adapters: to be initialized or loaded as ever."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    taken = [{name: module._parameters.pop(name) for name in ("lora_a", "lora_b")} for module in adapted]
    try:
        yield
    finally:
        for module, parameters in zip(adapted, taken, strict=True):
            module._parameters.update(parameters)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """A normal, B zero: training starts from the model as it was."""
    for index, module in enumerate(module for module in model.modules() if isinstance(module, LoraLinear)):
        fill_normal(module.lora_a, module.lora_a.shape[1] ** -0.5, seed * 1_000_003 + index)
        module.lora_b.zero_()


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Puts plain layers back, with what the adapters learned added to their weights. The model must not be sharded."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                out_features, in_features = child.weight.shape
                plain = nn.Linear(in_features, out_features, bias=child.bias is not None, device="meta")
                plain.weight = nn.Parameter(child.merged())
                plain.bias = child.bias
                setattr(parent, name, plain)
