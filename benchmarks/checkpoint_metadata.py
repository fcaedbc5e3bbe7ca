"""Time to read a step's `.metadata` as checked data, compared with pickle.

`python benchmarks/checkpoint_metadata.py` prints CPU time, the best of several rounds. Python's garbage collector is
on, as in a restore.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from time import process_time
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

from craton.ml.training.checkpoint.checksums import FileSum
from craton.ml.training.checkpoint.metadata import parse_metadata

ROUNDS = 5
ROWS, COLUMNS = 64, 4096  # of a chunk
CHUNK_BYTES = ROWS * COLUMNS * 4


def metadata(tensors: int, ranks: int) -> Metadata:
    """Return metadata of tensors that are sharded by rows over all ranks."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for tensor in range(tensors):
        name = f"optimizer.exp_avg.blocks.{tensor}.attention.qkv.weight"
        offsets = [torch.Size((rank * ROWS, 0)) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(offset, torch.Size((ROWS, COLUMNS))) for offset in offsets]
        for rank, offset in enumerate(offsets):
            place = _StorageInfo(f"__{rank}_0_0.distcp", tensor * CHUNK_BYTES, CHUNK_BYTES)
            places[MetadataIndex(name, offset, rank)] = place
        entries[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size((ROWS * ranks, COLUMNS)), chunks
        )
    return Metadata(entries, {name: (name,) for name in entries}, places)


def best_seconds(function: Callable[[], Any]) -> float:
    taken = []
    for _ in range(ROUNDS):
        begin = process_time()
        function()
        taken.append(process_time() - begin)
    return min(taken)


def main() -> None:
    print(f"{'tensors x ranks':<20}{'MB':>8}{'seconds':>10}{'pickle':>10}{'ratio':>8}")
    for tensors, ranks in ((900, 1), (900, 8), (300, 64), (900, 64)):
        data = pickle.dumps(metadata(tensors, ranks))
        files = {f"__{rank}_0_0.distcp": FileSum(0, tensors * CHUNK_BYTES, ()) for rank in range(ranks)}
        ours = best_seconds(lambda data=data, files=files: parse_metadata(data, files))
        theirs = best_seconds(lambda data=data: pickle.loads(data))
        name = f"{tensors} x {ranks}"
        print(f"{name:<20}{len(data) / 1e6:>8.1f}{ours:>10.3f}{theirs:>10.3f}{ours / theirs:>8.2f}")


if __name__ == "__main__":
    main()
