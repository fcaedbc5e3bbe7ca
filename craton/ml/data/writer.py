"""Write a folder of shards atomically: it is complete or does not exist.

Everything goes into FOLDER.partial, which no reader accepts as shards, and is renamed at the very end. An error or
Ctrl-C removes it. A killed process leaves it behind, and the next writer of the same folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from craton.formatting import stored
from craton.ml.data.errors import DataError, DiskFullError
from craton.ml.data.shards import INDEX, KINDS_WITH_LOSS, Index, Shard, ShardKind, TokenizerMark

SHARD_TOKENS = 1 << 28
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a partial folder to write into; it becomes `folder` when the block succeeds."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: already exists; remove it, or choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as lock:
        _take(lock, folder)
        try:
            for left in partial.iterdir():
                if left.name != "lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield partial
            (partial / "lock").unlink()
            if folder.exists():
                folder.rmdir()  # empty, as checked above
            partial.rename(folder)
        except BaseException as error:
            written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise DiskFullError(
                    f"{folder}: no space left after {stored(written)} ({os.strerror(error.errno or 0)}); the "
                    "partial output is removed: free some space, or write to another disk"
                ) from None
            raise


class ShardWriter:
    """Appends documents; starts a new shard at a document end once one is full."""

    def __init__(
        self, folder: Path, mark: TokenizerMark, kind: ShardKind = "text", shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.folder = folder
        self.documents = self.tokens = 0
        self._mark, self._kind, self._shard_tokens = mark, kind, shard_tokens
        self._dtype = np.dtype("uint16" if mark.vocab_size <= 1 << 16 else "uint32")
        self._shards: list[Shard] = []
        self._files: dict[str, _File] = {}
        self._in_shard = self._ended = self._shard_documents = 0
        self._max_id = 0
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, tokens: NDArray, ends: NDArray[np.int64], loss: NDArray[np.uint8] | None = None) -> None:
        """Append tokens of documents that end at `ends` (offsets in these tokens); the rest after the last end stays
        open."""
        if not len(tokens) and not len(ends):
            return
        if not self._files or (self._in_shard >= self._shard_tokens and self._ended == self._in_shard):
            self._next_shard()
        if len(tokens):
            self._max_id = max(self._max_id, int(tokens.max()))
        self._files[".tokens"].write(tokens.astype(self._dtype))
        self._files[".documents"].write((ends + self._in_shard).astype(np.uint64))
        if self._kind in KINDS_WITH_LOSS:
            assert loss is not None, f"{self._kind} shards need a loss mask"
            self._files[".loss"].write(loss.astype(np.uint8))
        if len(ends):
            self._ended = self._in_shard + int(ends[-1])
        self._in_shard += len(tokens)
        self._shard_documents += len(ends)
        self.tokens += len(tokens)
        self.documents += len(ends)

    def close(self) -> Index:
        """Finish the last shard and write the index."""
        self._finish_shard()
        index = Index(self._kind, self._dtype.name, self._max_id, self._mark, tuple(self._shards))
        with (self.folder / INDEX).open("w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        return index

    def _next_shard(self) -> None:
        self._finish_shard()
        name = f"shard-{len(self._shards):05d}"
        suffixes = (".tokens", ".documents", *((".loss",) if self._kind in KINDS_WITH_LOSS else ()))
        self._files = {suffix: _File(self.folder / f"{name}{suffix}") for suffix in suffixes}
        self._in_shard = self._ended = self._shard_documents = 0

    def _finish_shard(self) -> None:
        if not self._files:
            return
        assert self._ended == self._in_shard, "the last document has not ended"
        for file in self._files.values():
            file.finish()
        sizes = {suffix: file.bytes for suffix, file in self._files.items()}
        checksums = {suffix: file.crc32 for suffix, file in self._files.items()}
        name = f"shard-{len(self._shards):05d}"
        self._shards.append(Shard(name, self._in_shard, self._shard_documents, sizes, checksums))
        self._files = {}


class _File:
    """A file being written, with its running checksum."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("wb")
        self.bytes = 0
        self.crc32 = 0

    def write(self, array: NDArray) -> None:
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        self.stream.write(data)
        self.bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def finish(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{folder}: another process is writing it; wait for it, or choose another folder") from None
    except OSError:
        return  # a file system without locks cannot detect two writers
