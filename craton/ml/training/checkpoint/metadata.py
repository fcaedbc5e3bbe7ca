"""DCP's metadata, built from the contents of a `.metadata` file and checked against the files of the step.

After `parse_metadata` every tensor has a known dtype, its chunks are inside it and fill it, and every chunk is inside a
file of the step that is large enough. So a reader allocates no more than the files hold, and opens no other file. Each
problem is one line.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from craton.ml.training.checkpoint import pickle_data as names
from craton.ml.training.checkpoint.checksums import METADATA, CheckpointError, FileSum
from craton.ml.training.checkpoint.pickle_data import Name, PickledRecord, read_pickle, shown

MAX_NAME_LETTERS = 4096
MAX_ELEMENTS = 2**60  # of a tensor, dimensions of 0 ignored: torch multiplies them in 64 bits
_PROPERTIES = (torch.dtype, torch.layout, bool, Name, bool)  # the state of TensorProperties


def parse_metadata(data: bytes, files: Mapping[str, FileSum]) -> Metadata:
    """Parse the metadata of a step with these files. Runs nothing from the bytes; CheckpointError if they are
    invalid."""
    try:
        with _without_collection():
            return _metadata(_state(read_pickle(data), names.METADATA), files)
    except CheckpointError as error:
        raise CheckpointError(f"{METADATA} cannot be used, and nothing in it was run: {error}") from None


def _metadata(root: Mapping[str, Any], files: Mapping[str, FileSum]) -> Metadata:
    entries, places = root.get("state_dict_metadata"), root.get("storage_data")
    if type(entries) is not dict or type(places) is not dict:
        raise CheckpointError("it has no list of tensors")
    located = [_place(index, place, files) for index, place in places.items()]
    lengths = {(index.fqn, index.offset): place.length for index, place in located}
    if sum(map(_num_chunks, entries.values())) > len(lengths):
        raise CheckpointError("it lists more tensor parts than the files contain")
    tensors = {name: _tensor(name, entry, lengths) for name, entry in entries.items()}
    return Metadata(state_dict_metadata=dict(tensors), storage_data=dict(located))


def _place(index: Any, place: Any, files: Mapping[str, FileSum]) -> tuple[MetadataIndex, _StorageInfo]:
    fields, where = _state(index, names.INDEX), _state(place, names.PLACE)
    name, offset, hint = _checked_name(fields.get("fqn")), fields.get("offset"), fields.get("index")
    if type(offset) is not torch.Size or not (hint is None or type(hint) is int):
        raise CheckpointError(f"{name} is not a tensor, or its offset is missing")
    path, begin, length = where.get("relative_path"), where.get("offset"), where.get("length")
    file = files.get(path) if isinstance(path, str) else None
    if not isinstance(path, str) or file is None:
        raise CheckpointError(f"{name} is in {shown(path)}, which is not in checksums.json")
    if type(begin) is not int or type(length) is not int or begin < 0 or length <= 0 or begin + length > file.bytes:
        raise CheckpointError(f"{name} is at bytes {begin} to {begin}+{length} of {path}, which has {file.bytes} bytes")
    if where.get("transform_descriptors"):
        raise CheckpointError(f"{name} is compressed or encrypted, which Craton never writes")
    return MetadataIndex(name, offset, hint), _StorageInfo(path, begin, length)


def _num_chunks(entry: Any) -> int:
    chunks = _state(entry, names.TENSOR).get("chunks")
    if type(chunks) is not list:
        raise CheckpointError("a tensor has no list of its parts")
    return len(chunks)


def _tensor(
    name: Any, entry: PickledRecord, lengths: Mapping[tuple[str, torch.Size | None], int]
) -> TensorStorageMetadata:
    """`lengths`: bytes of each part in its file, by name and offset."""
    name = _checked_name(name)
    state = _state(entry, names.TENSOR)
    size, properties = state.get("size"), state.get("properties")
    if type(size) is not torch.Size:
        raise CheckpointError(f"{name} has no size")
    values = properties.state if type(properties) is PickledRecord and properties.name is names.PROPERTIES else None
    if type(values) is not tuple or tuple(map(type, values)) != _PROPERTIES:
        raise CheckpointError(f"{name} has no dtype, or invalid properties")
    dtype = values[0]
    chunks = []
    offsets_seen = set()
    elements = 0
    for part in state["chunks"]:
        fields = _state(part, names.CHUNK)
        offsets, sizes = fields.get("offsets"), fields.get("sizes")
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size or not _is_inside(offsets, sizes, size):
            raise CheckpointError(f"{name}: a part is outside its size {list(size)}")
        length = lengths.get((name, offsets))
        if length is None or offsets in offsets_seen:
            raise CheckpointError(f"{name}: a part of it is in no file, or listed twice")
        offsets_seen.add(offsets)
        count = math.prod(sizes)
        if count * dtype.itemsize > length:
            raise CheckpointError(f"{name}: {length} bytes are too few for {list(sizes)} of {dtype}")
        elements += count
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if math.prod(max(1, length) for length in size) > MAX_ELEMENTS:
        raise CheckpointError(f"{name}: its size {list(size)} is too large for a tensor")
    if elements != math.prod(size):
        raise CheckpointError(f"{name}: its parts have {elements} elements, which does not match its size {list(size)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _is_inside(offsets: torch.Size, sizes: torch.Size, whole: torch.Size) -> bool:
    if not len(offsets) == len(sizes) == len(whole):
        return False
    return all(offset + size <= limit for offset, size, limit in zip(offsets, sizes, whole, strict=True))


def _state(record: Any, name: Name) -> dict[str, Any]:
    if type(record) is not PickledRecord or record.name is not name or type(record.state) is not dict:
        raise CheckpointError(f"it has {shown(record)} instead of {name}")
    return record.state


def _checked_name(name: Any) -> str:
    """Return the name if it is safe to print."""
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_LETTERS or not name.isprintable():
        raise CheckpointError(f"{shown(name)} is not a valid tensor name")
    return name


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: it would scan the new objects repeatedly, which takes longer than creating them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
