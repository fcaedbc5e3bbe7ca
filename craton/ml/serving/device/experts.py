"""Experts of a served model that are split over ranks: each holds some whole experts and computes only their rows.

The ranks of a group gather the tokens of a step, choose the same experts, and sum what each computed. Training sends
rows to the ranks of their experts instead (`Delivery`). For that the host must read how many rows go where, so decode
could not be a CUDA graph, and a step would wait for the device. Here every shape follows from the number of tokens, and
the collectives are those of a dense MLP. The price is memory traffic: a rank also moves the rows of experts elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from craton.ml.collectives import ALONE, Peers
from craton.ml.models import Decoder, MoE


def split_mlps(model: Decoder) -> None:
    """Compute the MLPs of layers with experts on all ranks of `connections.experts` together, whose experts must have
    been cut (`cut_experts`)."""
    for module in model.modules():
        if type(module) is MoE:
            module.__class__ = ServedMoE
            assert isinstance(module, ServedMoE)
            module.join_shared()


class ServedMoE(MoE):
    """The MLP of a layer whose experts are split over `connections.experts`: tensor-parallel ranks next to each other.

    With fewer of them than tensor-parallel ranks, each group has all experts, for its share of the tokens."""

    has_joined: bool  # the shared experts' part is summed with that of the routed experts

    def join_shared(self) -> None:
        """Where both kinds of experts are split over the same ranks, let the shared ones return this rank's part of
        their output: one pair of collectives serves both."""
        tensor, experts = self.connections.tensor, self.connections.experts
        assert tensor is not None
        assert experts is not None
        self.has_joined = self.shared is not None and tensor.size == experts.size
        if self.shared is not None and self.has_joined:
            self.shared.connections = ALONE

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden], this rank's share of the tokens → the same shape."""
        peers = self.connections.experts
        assert peers is not None
        tokens = peers.gather(x.reshape(-1, x.shape[-1]))
        part = self._own_part(tokens, peers)
        if self.shared is None:
            return peers.scatter_sum(part).view_as(x)
        if self.has_joined:
            return peers.scatter_sum(part + self.shared(tokens)).view_as(x)
        shared: Tensor = self.shared(x)
        return peers.scatter_sum(part).view_as(x) + shared

    def _own_part(self, tokens: Tensor, peers: Peers) -> Tensor:
        """Return what this rank's experts add to the output of these tokens, [tokens, hidden]."""
        _, weights, chosen = self.choose(tokens)
        experts = self.router.weight.shape[0]
        own = experts // peers.size
        # Counted from this rank's first expert, its own experts come first.
        return self.mix_first(tokens, weights, (chosen - peers.rank * own) % experts, own)
