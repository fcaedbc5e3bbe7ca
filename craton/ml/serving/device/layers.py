"""The linear layers of a served model, split into methods that quantized weights and adapters override.

A layer multiplies all tokens by this rank's shard of its weight and adds the adapters' matmuls. Tokens are gathered
before and summed over ranks after, once, with or without adapters. There are no gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from craton.ml.collectives import local, own_slices
from craton.ml.kernels import linear, swiglu
from craton.ml.models import Linear, Mlp


class ServedLinear(Linear):
    """A linear layer whose matmul and adapters can be overridden."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part of the whole weight [out, in] that this rank holds."""
        return own_slices(self.weight)

    @property
    def shard_shape(self) -> tuple[int, int]:
        """Its outputs and inputs."""
        rows, columns = local(self.weight).shape
        return rows, columns

    @property
    def skinny(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight and scale that `skinny_linear` takes; None if another kernel multiplies a few tokens."""
        return local(self.weight), None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]; with tensor parallelism, tokens are in one dimension."""
        peers, flat = self.peers, x.flatten(0, -2)
        if peers is None:
            return self.own(flat).view(*x.shape[:-1], -1)
        return self.own(peers.gather(flat)) if self.cut == 0 else peers.scatter_sum(self.own(flat))

    def own(self, x: Tensor) -> Tensor:
        """x [tokens, in of this rank] → [tokens, out of this rank]; a share of the sum over ranks where `cut` is 1."""
        return self.adapt(self.product(self.prepare(x)), x)

    def prepare(self, x: Tensor) -> Any:
        """Return the input of `product`; layers of one class can share it."""
        return x

    def product(self, prepared: Any) -> Tensor:
        """Return the matmul with the weight plus the bias: a new tensor, which `adapt` may change in place."""
        return linear(prepared, self.weight, self.bias)


class ServedMlp(Mlp):
    """The gated MLP over `ServedLinear` layers."""

    gate: ServedLinear
    up: ServedLinear
    down: ServedLinear

    def forward(self, x: Tensor) -> Tensor:
        peers, flat = self.connections.tensor, x.flatten(0, -2)
        if peers is None:
            return self.down.own(self.lift(flat)).view(x.shape)
        return peers.scatter_sum(self.down.own(self.lift(peers.gather(flat))))

    def lift(self, x: Tensor) -> Tensor:
        """silu(gate(x)) · up(x)."""
        prepared = self.gate.prepare(x)
        gated, lifted = (layer.adapt(layer.product(prepared), x) for layer in (self.gate, self.up))
        return swiglu(gated, lifted)
