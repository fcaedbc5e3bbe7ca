"""Context-parallel attention: this rank holds two pieces of every sequence and attends to the keys of all ranks.

Keys and values are gathered and put in sequence order. The backward pass gathers them again, so a rank keeps only its
own; their gradients are reduce-scattered. A piece attends to itself causally, which overlaps with the gather, and to
all earlier pieces fully. So no masked score is computed and every rank has the same work. With documents or a window, a
piece attends to all its keys through one mask or one variable-length kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from craton.ml.collectives import Peers
from craton.ml.kernels.documents import ContextSlice, Documents, PieceOffsets, visible
from craton.ml.kernels.partial_attention import Gradients, Kernel, PackedFlash, choose_kernel, flash_takes, join

KeysAndValues = tuple[Tensor, Tensor]


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scale: float | None,
    window: int,
    context: Peers,
    gathered: bool,
) -> Tensor:
    """query [rows, 2 · piece, heads, d] → [rows, 2 · piece, heads, dv]; key and value are this rank's pieces too, or if
    `gathered`, those of the whole sequence in order."""
    place = ContextSlice(context.rank, context.size)
    sequence = query.shape[1] * context.size
    window = 0 if window >= sequence else window
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    work: _Work
    if documents is None and not window:
        work = _Joined(place, choose_kernel(query, key, value, scale))
    else:
        work = _Bounded(place, _bounded_kernels(query, key, value, documents, scale, window, place))
    out: Tensor = _ContextAttention.apply(query, key, value, work, None if gathered else context)
    return out


def gather_in_order(x: Tensor, peers: Peers, size: int, rows: int) -> Tensor:
    """Gather the tokens of `rows` rows from all ranks in sequence order, [rows, sequence, …]; the gradient is
    reduce-scattered. `size` is that of the context group. There may be more peers, those of each context rank
    consecutively; then x is this rank's share of its two pieces, [tokens, …]."""
    out: Tensor = _GatherInOrder.apply(x, peers, size, rows)
    return out


class _GatherInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, size: int, rows: int) -> Tensor:
        ctx.peers, ctx.size, ctx.shape = peers, size, x.shape
        return _in_order(peers.gather(x).view(size * rows, -1, x.shape[-1]), size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_rank = _by_rank(gradient, ctx.size).view(-1, *ctx.shape[1:])
        return ctx.peers.scatter_sum(by_rank), None, None, None


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: _Work, context: Peers | None) -> Tensor:
        out, *lses = work.forward(query, _Keys(key, value, work.place, context))
        ctx.save_for_backward(query, key, value, out, *lses)
        ctx.work, ctx.context = work, context
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *lses = ctx.saved_tensors
        keys = _Keys(key, value, ctx.work.place, ctx.context)
        of_query, of_key, of_value = ctx.work.backward(gradient, query, keys, out, lses)
        if ctx.context is not None:
            size = ctx.context.size
            started = [ctx.context.start_scatter_sum(_by_rank(entry, size)) for entry in (of_key, of_value)]
            of_key, of_value = (ctx.context.wait(item) for item in started)
        return of_query, of_key, of_value, None, None


class _Keys:
    """Keys and values: those of this rank's pieces immediately, all of them once they have arrived."""

    def __init__(self, key: Tensor, value: Tensor, place: ContextSlice, context: Peers | None) -> None:
        self._given, self._place, self._context = (key, value), place, context
        self._started = [] if context is None else [context.start_gather(tensor) for tensor in (key, value)]

    def own(self) -> tuple[KeysAndValues, KeysAndValues]:
        """Of the early piece and of the late one."""
        key, value = self._given
        if self._context is None:
            pieces = self._place.pieces
            keys, values = (tensor.chunk(2 * self._place.size, dim=1) for tensor in (key, value))
            return (keys[pieces[0]], values[pieces[0]]), (keys[pieces[1]], values[pieces[1]])
        (early_key, late_key), (early_value, late_value) = key.chunk(2, dim=1), value.chunk(2, dim=1)
        return (early_key, early_value), (late_key, late_value)

    def whole(self) -> KeysAndValues:
        if self._context is None:
            return self._given
        key, value = (_in_order(self._context.wait(item), self._context.size) for item in self._started)
        return key, value


@dataclass(frozen=True)
class _Joined:
    """A piece on itself and on all earlier pieces, joined."""

    place: ContextSlice
    kernel: Kernel

    def forward(self, query: Tensor, keys: _Keys) -> list[Tensor]:
        queries = query.chunk(2, dim=1)
        length = queries[0].shape[1]
        parts = [[self.kernel.forward(item, *own, True)] for item, own in zip(queries, keys.own(), strict=True)]
        key, value = keys.whole()
        for piece, entry, joined in zip(self.place.pieces, queries, parts, strict=True):
            if before := piece * length:
                joined.append(self.kernel.forward(entry, key[:, :before], value[:, :before], False))
        (early, early_lse), (late, late_lse) = (join(part) for part in parts)
        return [torch.cat((early, late), dim=1), early_lse, late_lse]

    def backward(self, gradient: Tensor, query: Tensor, keys: _Keys, out: Tensor, lses: list[Tensor]) -> Gradients:
        slopes, queries, outs = (tensor.chunk(2, dim=1) for tensor in (gradient, query, out))
        length = queries[0].shape[1]
        pieces = list(zip(self.place.pieces, slopes, queries, outs, lses, strict=True))
        of_own = [
            self.kernel.backward(slope, item, *own, mixed, lse, True)
            for (_, slope, item, mixed, lse), own in zip(pieces, keys.own(), strict=True)
        ]
        key, value = keys.whole()
        of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        for (piece, slope, entry, mixed, lse), (own_query, own_key, own_value) in zip(pieces, of_own, strict=True):
            before = piece * length
            of_key[:, before : before + length] += own_key
            of_value[:, before : before + length] += own_value
            if before:
                earlier_keys = key[:, :before], value[:, :before]
                earlier = self.kernel.backward(slope, entry, *earlier_keys, mixed, lse, False)
                own_query = own_query + earlier[0]
                of_key[:, :before] += earlier[1]
                of_value[:, :before] += earlier[2]
            of_query.append(own_query)
        return torch.cat(of_query, dim=1), of_key, of_value


@dataclass(frozen=True)
class _Bounded:
    """A piece on all keys up to its end, with a kernel that knows which of them are visible."""

    place: ContextSlice
    kernels: tuple[Kernel, ...]

    def forward(self, query: Tensor, keys: _Keys) -> list[Tensor]:
        key, value = keys.whole()
        length = query.shape[1] // 2
        outs, lses = [], []
        for piece, kernel, item in zip(self.place.pieces, self.kernels, query.chunk(2, dim=1), strict=True):
            end = (piece + 1) * length
            out, lse = kernel.forward(item, key[:, :end], value[:, :end], False)
            outs.append(out)
            lses.append(lse)
        return [torch.cat(outs, dim=1), *lses]

    def backward(self, gradient: Tensor, query: Tensor, keys: _Keys, out: Tensor, lses: list[Tensor]) -> Gradients:
        key, value = keys.whole()
        length = query.shape[1] // 2
        of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        halves = (tensor.chunk(2, dim=1) for tensor in (gradient, query, out))
        for piece, kernel, slope, item, mixed, lse in zip(self.place.pieces, self.kernels, *halves, lses, strict=True):
            end = (piece + 1) * length
            part = kernel.backward(slope, item, key[:, :end], value[:, :end], mixed, lse, False)
            of_query.append(part[0])
            of_key[:, :end] += part[1]
            of_value[:, :end] += part[2]
        return torch.cat(of_query, dim=1), of_key, of_value


_Work = _Joined | _Bounded


def _bounded_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scale: float,
    window: int,
    place: ContextSlice,
) -> tuple[Kernel, ...]:
    rows, length = query.shape[0], query.shape[1] // 2
    if flash_takes(query):
        assert documents is None or documents.pieces, "a context-parallel batch must be cut with Batch.cut"
        offsets = [_of_rows(rows, length, piece, query.device) for piece in place.pieces]
        if documents is not None:
            offsets = list(documents.pieces)
        return tuple(PackedFlash(scale, window, offset) for offset in offsets)
    numbers = None if documents is None else documents.numbers
    ends = [(piece + 1) * length for piece in place.pieces]
    masks = [visible(end - length, end, window, numbers, query.device) for end in ends]
    return tuple(choose_kernel(query, key, value, scale, mask) for mask in masks)


def _of_rows(rows: int, length: int, piece: int, device: torch.device) -> PieceOffsets:
    """Offsets of rows that are one document each, without a host synchronization."""
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
    end = (piece + 1) * length
    return PieceOffsets((0,) * rows, numbers * length, numbers * end, length, end)


def _in_order(gathered: Tensor, size: int) -> Tensor:
    """[size · rows, 2 · piece, …], rank by rank → [rows, sequence, …]."""
    by_rank = [item.chunk(2, dim=1) for item in gathered.chunk(size)]
    return torch.cat([early for early, _ in by_rank] + [late for _, late in reversed(by_rank)], dim=1)


def _by_rank(whole: Tensor, size: int) -> Tensor:
    """The inverse of `_in_order`."""
    pieces = whole.chunk(2 * size, dim=1)
    ordered = [pieces[piece] for rank in range(size) for piece in ContextSlice(rank, size).pieces]
    by_rank: Tensor = torch.stack(ordered).unflatten(0, (size, 2)).transpose(1, 2)  # [size, rows, 2, piece, …]
    return by_rank.flatten(2, 3).flatten(0, 1)
