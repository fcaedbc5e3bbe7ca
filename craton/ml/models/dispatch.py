"""Dispatch of tokens to experts and back: (token, expert) pairs are the rows.

On one rank, rows are sorted by expert. With expert parallelism they also change ranks: every rank sends each row to the
rank that holds its expert and gets the result back. Rows are only gathered, never added atomically, so results are
reproducible. The host waits once, for the number of rows per rank, because it must allocate memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from craton.ml.collectives import Peers, exchange


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the flattened [tokens, top_k] pairs, return their order by expert, its inverse, and where each expert's rows
    end."""
    sorted_experts, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(experts, device=chosen.device)
    return order, inverse, torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


def repeat_tokens(tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Return one row of tokens per pair, in this order."""
    rows: Tensor = _Repeat.apply(tokens, order, inverse, top_k)
    return rows


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order]; `inverse` undoes it."""
    out: Tensor = _Permute.apply(rows, order, inverse)
    return out


def rows_per_expert(ends: Tensor) -> Tensor:
    """Row counts from where each expert's rows end."""
    return ends.diff(prepend=ends.new_zeros(1))


def split_sizes(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many of this rank's `rows` go to every rank, and how many come from it. Both inputs are counts [ranks,
    experts per rank]. The only place where the host reads the router's choice; a trace with fake tensors replaces it.
    """
    to_ranks, from_ranks = torch.stack((sent.sum(1), received.sum(1))).tolist()
    assert sum(to_ranks) == rows
    return to_ranks, from_ranks


class Delivery:
    """Sends rows sorted by expert to the ranks that hold the experts, and back. `ends` is where the rows of each local
    expert end."""

    def __init__(self, ends: Tensor, rows: int, peers: Peers) -> None:
        self.peers = peers
        own = len(ends) // peers.size
        sent = rows_per_expert(ends)
        received = peers.exchange(sent, [own] * peers.size, [own] * peers.size).view(peers.size, own)
        self.sent, self.received = split_sizes(sent.view(peers.size, own), received, rows)
        self._flight = _Flight(self.received, self.sent, peers)
        self.ends = received.sum(0).cumsum(0).int()
        # Rows arrive by (source, expert) and are needed by (expert, source): each block of them moves as a whole.
        arrived, wanted = _starts(received), _starts(received.t()).t()
        total = sum(self.received)
        arriving = torch.arange(total, device=ends.device)
        self._order = arriving + _spread((arrived - wanted).t(), received.t(), total)
        self._inverse = arriving + _spread(wanted - arrived, received, total)

    def send(self, rows: Tensor) -> Tensor:
        """Start the all-to-all; only `receive` may read the result."""
        started: Tensor = _Start.apply(rows, self._flight)
        return started

    def receive(self, started: Tensor) -> Tensor:
        """Return the rows sent to this rank, sorted by its experts."""
        return permute(_Finish.apply(started, self._flight), self._order, self._inverse)

    def give_back(self, rows: Tensor) -> Tensor:
        """Return every row to its source rank, in the order in which it was sent."""
        return exchange(permute(rows, self._inverse, self._order), self.sent, self.received, self.peers)


def _starts(counts: Tensor) -> Tensor:
    """Where every block begins when all are stored consecutively, row by row."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view_as(counts)


def _spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """One value for each row of every block."""
    return values.flatten().repeat_interleave(counts.flatten(), output_size=total)


class _Repeat(torch.autograd.Function):
    """The gradient gathers through the inverse: no atomic adds."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """The gradient gathers through the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


@dataclass
class _Flight:
    """An all-to-all in two halves. Work between them overlaps with it, forward and backward: the gradient starts back
    where the second half was, and the first half waits for it."""

    received: Sequence[int]
    sent: Sequence[int]
    peers: Peers
    gradient: Tensor | None = None  # on its way back


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.peers.start_exchange(x, flight.received, flight.sent)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        started, ctx.flight.gradient = ctx.flight.gradient, None
        return ctx.flight.peers.wait(started), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.peers.wait(started)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.gradient = flight.peers.start_exchange(gradient, flight.sent, flight.received)
        return gradient, None  # autograd expects this shape; the value is never read
