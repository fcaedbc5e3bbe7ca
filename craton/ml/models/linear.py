"""Layers that tensor parallelism shards, up to the gated MLP of a dense layer. Each declares which dimension of its
parameters is sharded; on a single rank it is a plain layer.

Between layers a rank holds its share of the flattened tokens, [rows · sequence / tp, hidden] (sequence parallel).
Inside a pair of layers, one sharded by rows (`cut` 0) and one by columns (`cut` 1), it holds all tokens and some of
their features.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm

from craton.ml.collectives import ALONE, Connections, Peers, own_part, scatter_sum
from craton.ml.kernels import gated_mlp, linear, scatter_linear


class LowRank(NamedTuple):
    """What adapters add to a weight: b · a. `absent`: for each token, the columns that it does not use."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    absent: Tensor | None = None  # bool [tokens, rank]

    def used(self, narrow: Tensor) -> Tensor:
        """narrow [tokens, heads, rank] → the same, with zeros in absent columns."""
        return narrow if self.absent is None else narrow.masked_fill(self.absent.unsqueeze(1), 0.0)


class Linear(nn.Linear):
    """x · weightᵀ + bias. `cut` None: every rank holds the whole weight and applies it to its share of the tokens."""

    part_multiple = 1  # the size of a part must be a multiple of this

    def __init__(self, in_features: int, out_features: int, bias: bool = False, cut: int | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        assert not (bias and cut == 1), "every rank would add the bias"
        self.cut = cut
        self.connections: Connections = ALONE

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there, torch would import its compilers, for seconds
            super().reset_parameters()

    @property
    def tensor_cuts(self) -> dict[str, int]:
        """The dimension that tensor parallelism shards, for each sharded parameter."""
        return {} if self.cut is None else {"weight": self.cut, "bias": 0}

    @property
    def peers(self) -> Peers | None:
        return None if self.cut is None else self.connections.tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == 1 and self.peers is not None:
            return self.adapt(scatter_linear(x, self.weight, self.peers), x)
        return self.adapt(linear(x, self.weight, self.bias, self.peers), x)

    def adapt(self, out: Tensor, _x: Tensor) -> Tensor:
        """Hook for layers with adapters: return the adapted output."""
        return out

    @property
    def low_rank(self) -> LowRank | None:
        """The adapters of the layer, for a caller that multiplies with parts of its weight."""
        return None


class Embedding(nn.Embedding):
    """Rows of the weight. Sharded by vocabulary, each rank looks up its own rows; the sum over ranks is complete."""

    tensor_cuts: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.connections: Connections = ALONE

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # as in Linear
            super().reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [rows, sequence] → [rows, sequence, hidden], or with peers [rows · sequence / tp, hidden]."""
        peers, weight = self.connections.tensor, own_part(self.weight)
        if peers is None:
            return embedding(tokens, weight)
        index = tokens.flatten() - peers.rank * weight.shape[0]
        elsewhere = (index < 0) | (index >= weight.shape[0])
        embedded = embedding(index.masked_fill(elsewhere, 0), weight)
        return scatter_sum(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), peers)


class Norm(nn.RMSNorm):
    """A root-mean-square norm of the last dimension; its weight is replicated."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, tuple(self.normalized_shape), own_part(self.weight), self.eps)


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
