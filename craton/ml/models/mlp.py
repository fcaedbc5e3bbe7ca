"""The gated MLP of a dense layer."""

from __future__ import annotations

from torch import Tensor, nn

from craton.ml.kernels import gated_mlp, reference


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.gate) is type(self.up) is type(self.down) is nn.Linear:
            return gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight)
        # a layer that was replaced (adapters, fp8) runs as itself
        out: Tensor = self.down(reference.swiglu(self.gate(x), self.up(x)))
        return out
