"""The gated MLP of a dense layer."""

from __future__ import annotations

from torch import Tensor, nn

from craton.ml.collectives import ALONE, Connections
from craton.ml.kernels import gated_mlp
from craton.ml.models.linear import Linear


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.connections: Connections = ALONE
        self.gate = Linear(hidden, ffn_hidden, cut=0)
        self.up = Linear(hidden, ffn_hidden, cut=0)
        self.down = Linear(ffn_hidden, hidden, cut=1)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight, self.connections.tensor)
