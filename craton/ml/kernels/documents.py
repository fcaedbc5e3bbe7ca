"""Document boundaries of packed rows, and the slices of them that each context-parallel rank holds.

A context group of n ranks cuts every sequence into 2 · n pieces. Rank i holds pieces i and 2 · n - 1 - i, one early and
one late, so causal attention is the same work on every rank. Offsets are computed on the host before the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class ContextSlice:
    """One rank of a context group."""

    rank: int
    size: int

    @property
    def pieces(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, whole: Tensor) -> Tensor:
        """[rows, sequence, …] → the two pieces of this rank, [rows, sequence / size, …]."""
        by_piece = whole.chunk(2 * self.size, dim=1)
        return torch.cat([by_piece[piece] for piece in self.pieces], dim=1)


@dataclass(frozen=True)
class PieceOffsets:
    """The documents of one piece. The first one may have begun in an earlier piece: then there are more keys than
    queries, and the last of both are the same token."""

    first_keys: tuple[int, ...]  # per row, where the first document of the piece begins
    queries: Tensor  # int32 [documents + 1], offsets in the flattened rows of the piece
    keys: Tensor  # int32 [documents + 1], offsets in the flattened rows, each from its first key to the piece's end
    most_queries: int
    most_keys: int

    def to(self, device: torch.device | str) -> PieceOffsets:
        queries, keys = (tensor.to(device, non_blocking=True) for tensor in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys)

    def pin(self) -> PieceOffsets:
        return replace(self, queries=self.queries.pin_memory(), keys=self.keys.pin_memory())


@dataclass(frozen=True)
class Documents:
    """Which tokens of the rows belong to the same document, as numbers and as offsets, computed on the host before the
    step."""

    numbers: Tensor  # int32 [rows, sequence], of the whole sequence even if the batch is cut by cp
    offsets: Tensor  # int32 [documents + 1], where each begins in the flattened rows, and the end
    longest: int
    pieces: tuple[PieceOffsets, ...] = ()  # the pieces of this rank, if the batch is cut by cp

    @classmethod
    def of(cls, numbers: Tensor | Documents | None) -> Documents | None:
        """Build from document numbers; waits for the device if they are not on the host."""
        if numbers is None or isinstance(numbers, Documents):
            return numbers
        host = numbers.cpu()
        starts = _begins(host).flatten().nonzero().flatten()
        offsets = torch.cat([starts, starts.new_tensor([host.numel()])]).to(torch.int32)
        return cls(numbers, offsets.to(numbers.device), int(offsets.diff().max()))

    def cut(self, place: ContextSlice) -> Documents:
        """Return the same with the offsets of this rank's pieces; on the host."""
        length = self.numbers.shape[1] // (2 * place.size)
        begins = _begins(self.numbers)
        return replace(self, pieces=tuple(_piece(begins, piece * length, length) for piece in place.pieces))

    def padded(self) -> Documents:
        """Return the same with empty documents at the end, up to a power of two, and with `longest` as the next power
        of two: attention ignores both, and batches have few shapes."""
        count = len(self.offsets) - 1
        more = _power_of_two(count) - count
        offsets = pad(self.offsets, (0, more), value=self.numbers.numel())
        return replace(self, offsets=offsets, longest=min(_power_of_two(self.longest), self.numbers.shape[1]))

    def clone(self) -> Documents:
        assert not self.pieces, "the documents of a context-parallel rank are not cloned"
        return replace(self, numbers=self.numbers.clone(), offsets=self.offsets.clone())

    def to(self, device: torch.device | str) -> Documents:
        numbers, offsets = (tensor.to(device, non_blocking=True) for tensor in (self.numbers, self.offsets))
        return Documents(numbers, offsets, self.longest, tuple(piece.to(device) for piece in self.pieces))

    def pin(self) -> Documents:
        pieces = tuple(piece.pin() for piece in self.pieces)
        return Documents(self.numbers.pin_memory(), self.offsets.pin_memory(), self.longest, pieces)


def visible(begin: int, end: int, window: int, numbers: Tensor | None, device: torch.device) -> Tensor:
    """True where a token from `begin` to `end` may attend to one before `end`: [rows or 1, 1, end - begin, end]."""
    place = torch.arange(end, device=device)
    distance = place[begin:, None] - place[None, :]
    mask = distance >= 0
    if window:
        mask &= distance < window
    mask = mask[None, None]
    if numbers is not None:
        mask = mask & (numbers[:, None, begin:end, None] == numbers[:, None, None, :end])
    return mask


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _begins(numbers: Tensor) -> Tensor:
    """True at the first token of every document."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def _piece(begins: Tensor, start: int, length: int) -> PieceOffsets:
    first_keys: list[int] = []
    queries: list[int] = []  # tokens of each document
    keys: list[int] = []
    for row in begins:
        first_keys.append(int(row[: start + 1].nonzero()[-1]))
        inside = [start, *(row[start + 1 : start + length].nonzero().flatten() + start + 1).tolist(), start + length]
        lengths = [following - begin for begin, following in pairwise(inside)]
        queries += lengths
        keys += [lengths[0] + start - first_keys[-1], *lengths[1:]]
    return PieceOffsets(tuple(first_keys), _offsets(queries), _offsets(keys), max(queries), max(keys))


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
