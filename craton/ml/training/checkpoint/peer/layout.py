"""How a rank's tensors are stored in a slot: raw bytes, chunk after chunk, each aligned to a cache line.

The list of chunks is a text. Equal texts mean that a slot can be copied into the tensors directly, and that the ranks
hold the same state (replicas).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from craton.ml.collectives import own_slices
from craton.ml.training.checkpoint.pickle_data import DTYPES
from craton.ml.training.checkpoint.read import RawPlace
from craton.ml.training.checkpoint.staging import local_data

ALIGNMENT = 64


@dataclass(frozen=True)
class Chunk:
    """A rank's part of one tensor, and its offset in the slot's data."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offsets))

    def place(self, file: str) -> RawPlace:
        return RawPlace(file, self.begin, self.bytes, self.dtype, self.sizes)

    def read_item(self) -> ReadItem:
        """The read item for exactly this chunk."""
        nothing, sizes = torch.Size([0] * len(self.sizes)), torch.Size(self.sizes)
        return ReadItem(LoadItemType.TENSOR, self.index, nothing, self.index, nothing, sizes)

    def view(self, data: Tensor) -> Tensor:
        """This chunk in the bytes of a slot."""
        return data[self.begin : self.begin + self.bytes].view(self.dtype).view(self.sizes)


@dataclass(frozen=True)
class SlotLayout:
    """All chunks of a rank."""

    chunks: tuple[Chunk, ...]
    text: str

    @property
    def bytes(self) -> int:
        return self.chunks[-1].begin + self.chunks[-1].bytes if self.chunks else 0

    @property
    def digest(self) -> str:
        return digest_of(self.text)


def layout_of(tensors: Mapping[str, Tensor]) -> SlotLayout:
    """Return the layout of these tensors on this rank; a part without elements takes no space."""
    chunks, begin = [], 0
    for name, part in local_data(tensors).items():
        if part.numel() == 0:
            continue
        offsets = tuple(own_slice.start or 0 for own_slice in own_slices(tensors[name]))
        chunk = Chunk(name, tuple(tensors[name].shape), part.dtype, offsets, tuple(part.shape), begin)
        chunks.append(chunk)
        begin = -(-(begin + chunk.bytes) // ALIGNMENT) * ALIGNMENT
    text = json.dumps(
        [[item.name, item.shape, _name_of(item.dtype), item.offsets, item.sizes, item.begin] for item in chunks],
        separators=(",", ":"),
    )
    return SlotLayout(tuple(chunks), text)


def parse_layout(text: str) -> SlotLayout:
    chunks = [
        Chunk(name, tuple(shape), DTYPES[dtype], tuple(offsets), tuple(sizes), begin)
        for name, shape, dtype, offsets, sizes, begin in json.loads(text)
    ]
    return SlotLayout(tuple(chunks), text)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def metadata_of(layouts: Sequence[tuple[str, SlotLayout]]) -> Metadata:
    """Return the metadata from which DCP plans a load: the chunks of all these files. The first file with a chunk
    counts."""
    entries: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, RawPlace] = {}
    for file, layout in layouts:
        for chunk in layout.chunks:
            if chunk.index in places:
                continue
            places[chunk.index] = chunk.place(file)
            properties = TensorProperties(dtype=chunk.dtype)
            entry = entries.setdefault(chunk.name, TensorStorageMetadata(properties, torch.Size(chunk.shape), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    return Metadata(state_dict_metadata=dict(entries), storage_data=places)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
