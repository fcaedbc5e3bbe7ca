"""One packed batch: the only thing that a data source passes to the loop, for every objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from craton.errors import CratonError
from craton.ml.collectives import Peers
from craton.ml.kernels import ContextSlice, Documents

IGNORED = -100  # a label without loss

BatchShape = tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], tuple[str, ...], int]


class BatchError(CratonError):
    """The rows cannot be cut as the layout requires."""


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. `labels[t]` is the token after `tokens[t]`, IGNORED if that token belongs to another
    document. `documents` says which tokens belong together; None if each row is one document."""

    tokens: Tensor  # int64 [rows, sequence]
    labels: Tensor  # int64 [rows, sequence]
    positions: Tensor  # int64 [rows, sequence], from 0 in every document
    weight: Tensor  # float32 [rows, sequence], loss weight of each label (the loss mask)
    documents: Documents | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)  # passed from a data source to its objective
    context: Peers | None = None  # the ranks with the other pieces of these rows

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Batch:
        """Build from the arrays of one micro-batch; unknown names become `extra`."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        tokens, labels, positions, weight = (tensors.pop(name) for name in ("tokens", "labels", "positions", "weight"))
        return cls(tokens, labels, positions, weight, Documents.of(tensors.pop("documents", None)), tensors)

    @property
    def count(self) -> Tensor:
        """Weight of the labels, by which the loss is divided after summing over ranks and micro-batches."""
        return self.weight.sum()

    @property
    def shape(self) -> BatchShape:
        """What decides which kernels run on this batch, and on how many numbers."""
        longest = 0 if self.documents is None else self.documents.longest
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in self._tensors()), tuple(self.extra), longest

    def with_fixed_documents(self) -> Batch:
        """Return the batch with one of few shapes: its document boundaries padded (see `Documents.padded`)."""
        return self if self.documents is None else replace(self, documents=self.documents.padded())

    def clone(self) -> Batch:
        """Return a copy with memory of its own."""
        return Batch(
            self.tokens.clone(),
            self.labels.clone(),
            self.positions.clone(),
            self.weight.clone(),
            None if self.documents is None else self.documents.clone(),
            {name: tensor.clone() for name, tensor in self.extra.items()},
            self.context,
        )

    def copy_(self, other: Batch) -> None:
        """Overwrite the tensors with those of a batch of the same shape."""
        torch._foreach_copy_(self._tensors(), other._tensors(), non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        documents = () if self.documents is None else (self.documents.numbers, self.documents.offsets)
        return [self.tokens, self.labels, self.positions, self.weight, *documents, *self.extra.values()]

    def cut(self, context: Peers | None) -> Batch:
        """Return this context-parallel rank's two pieces of every row. Documents stay whole and know the offsets of the
        pieces. Runs on the host; without a context group, returns the batch itself."""
        if context is None:
            return self
        place, sequence = ContextSlice(context.rank, context.size), self.tokens.shape[1]
        if sequence % (2 * place.size):
            raise BatchError(
                f"cp {place.size} splits a sequence into 2·cp = {2 * place.size} pieces, but {sequence} tokens are not "
                f"divisible by that; use a data.sequence that is a multiple of {2 * place.size}, or another cp"
            )
        return Batch(
            place.cut(self.tokens),
            place.cut(self.labels),
            place.cut(self.positions),
            place.cut(self.weight),
            None if self.documents is None else self.documents.cut(place),
            {
                name: place.cut(tensor) if tensor.shape[:2] == self.tokens.shape else tensor
                for name, tensor in self.extra.items()
            },
            context,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Move to a device; from pinned memory the copy overlaps with computation."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(
            move(self.tokens),
            move(self.labels),
            move(self.positions),
            move(self.weight),
            None if self.documents is None else self.documents.to(device),
            {name: move(tensor) for name, tensor in self.extra.items()},
            self.context,
        )

    def pin(self) -> Batch:
        """Copy to page-locked memory, for asynchronous transfers."""
        return Batch(
            self.tokens.pin_memory(),
            self.labels.pin_memory(),
            self.positions.pin_memory(),
            self.weight.pin_memory(),
            None if self.documents is None else self.documents.pin(),
            {name: tensor.pin_memory() for name, tensor in self.extra.items()},
            self.context,
        )
