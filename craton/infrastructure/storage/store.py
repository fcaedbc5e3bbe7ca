"""One interface for a folder and an `s3://bucket/prefix`: an object is either complete or does not exist.

Names are relative, with slashes (`step-00000200/__0_0.distcp`). Every call succeeds or raises StorageError, which says
what was tried and what to do; ObjectMissingError means that the object does not exist. A store is thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from craton.infrastructure.errors import ObjectMissingError, StorageError

Bytes = Any  # anything with the buffer protocol: bytes, memoryview, an array of bytes
STREAM_BYTES = 16 * 2**20
READS_IN_FLIGHT = 8


@dataclass(frozen=True)
class ObjectInfo:
    """One object; `tag` changes whenever the content changes."""

    name: str
    bytes: int
    tag: str


Objects = list[ObjectInfo]  # `list` is also a method of every store
Names = list[str]


class ObjectWriter(Protocol):
    """An object being written. The buffer given to `write` may be reused as soon as it returns."""

    bytes: int

    def write(self, data: Bytes) -> None: ...


class Store(ABC):
    """Objects below one location; `url` is that location as a user would write it."""

    url: str

    @abstractmethod
    def create(self, name: str, expected_bytes: int = 0) -> AbstractContextManager[ObjectWriter]:
        """Return a writer for one object. The object appears atomically and durably when the block ends, and never if
        the block raises. `expected_bytes` lets S3 choose its part size; objects under 150 GB need no hint."""

    @abstractmethod
    def info(self, name: str) -> ObjectInfo | None:
        """Return the object's info; None if it does not exist."""

    @abstractmethod
    def list(self, prefix: str = "") -> Objects:
        """Return every object below this folder, sorted by name; names are relative to the store."""

    @abstractmethod
    def folders(self, prefix: str = "") -> Names:
        """Return the names of the folders directly in this one, sorted."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""

    @abstractmethod
    def check_writable(self, seconds: float | None = None) -> None:
        """Write and remove a small object, to find problems early. `seconds` limits the wait for a service that does
        not respond; the default is the limit of ordinary requests."""

    @abstractmethod
    def _read_into(self, info: ObjectInfo, begin: int, target: memoryview) -> None:
        """Fill the target from `begin` on, or raise."""

    def read(self, name: str) -> bytes:
        """Return the whole object."""
        info = self._must(name)
        return bytes(self.read_range(info, 0, info.bytes))

    def read_range(self, info: ObjectInfo, begin: int, end: int) -> Bytes:
        """Return the bytes from `begin` up to `end` of the object in `info`, in parallel pieces if large. The buffer
        may belong to the client."""
        if 0 < end - begin <= STREAM_BYTES:
            return self._read(info, begin, end)
        content = bytearray(end - begin)
        view = memoryview(content)
        pieces = [(begin + at, view[at : at + STREAM_BYTES]) for at in range(0, view.nbytes, STREAM_BYTES)]
        with ThreadPoolExecutor(READS_IN_FLIGHT) as pool:
            for _ in pool.map(lambda piece: self._read_into(info, *piece), pieces):
                pass
        return content

    def stream(self, info: ObjectInfo, begin: int = 0) -> Iterator[memoryview]:
        """Yield the object in `info` from `begin` on, piece by piece, with read-ahead. Where tags identify versions
        (S3), all pieces are of the version in `info`."""
        group = STREAM_BYTES * READS_IN_FLIGHT // 2
        spans = [(at, min(at + group, info.bytes)) for at in range(begin, info.bytes, group)]
        with ThreadPoolExecutor(1) as pool:
            ahead = [pool.submit(self.read_range, info, *span) for span in spans[:1]]
            for following in range(1, len(spans) + 1):
                piece = ahead.pop().result()
                ahead += [pool.submit(self.read_range, info, *span) for span in spans[following : following + 1]]
                yield memoryview(piece)

    def put(self, name: str, content: bytes | str) -> None:
        """Write a small object."""
        content = content.encode() if isinstance(content, str) else content
        with self.create(name, len(content)) as writer:
            writer.write(content)

    def exists(self, name: str) -> bool:
        return self.info(name) is not None

    def delete_tree(self, folder: str) -> None:
        """Delete every object below this folder; "" is all of them."""
        self.delete([item.name for item in self.list(folder)])

    def where(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def _read(self, info: ObjectInfo, begin: int, end: int) -> Bytes:
        """Return one piece in a new buffer."""
        content = bytearray(end - begin)
        self._read_into(info, begin, memoryview(content))
        return content

    def _must(self, name: str) -> ObjectInfo:
        info = self.info(name)
        if info is None:
            raise ObjectMissingError(f"{self.where(name)} does not exist")
        return info


def checked_name(name: str) -> str:
    """Return the name if it stays below its store, else raise StorageError."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise StorageError(f"{name!r} cannot name an object; give a relative path with single slashes and without ..")
    return name


def as_bytes(data: Bytes) -> memoryview:
    view = data if isinstance(data, memoryview) else memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
