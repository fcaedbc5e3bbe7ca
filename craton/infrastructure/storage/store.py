"""One interface over a folder and an `s3://bucket/prefix`: named objects that are there whole or not at all.

Names are relative, with slashes (`step-00000200/__0_0.distcp`). Every call either did what it says or raises
StorageError, which tells what was tried and what to do; ObjectMissingError is the one for a name that is not there.
A store may be used by several threads at once.
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

Bytes = Any  # whatever has the buffer protocol: bytes, memoryview, an array of bytes
STREAM_BYTES = 16 * 2**20
READS_IN_FLIGHT = 8


@dataclass(frozen=True)
class ObjectInfo:
    """One object; `tag` is another one whenever the content is another one."""

    name: str
    bytes: int
    tag: str


Objects = list[ObjectInfo]  # `list` is also a method of every store
Names = list[str]


class ObjectWriter(Protocol):
    """An object on its way. The buffer given to `write` may be used again as soon as it returns."""

    bytes: int

    def write(self, data: Bytes) -> None: ...


class Store(ABC):
    """Objects below one place; `url` says which, as a person would write it."""

    url: str

    @abstractmethod
    def create(self, name: str, expected_bytes: int = 0) -> AbstractContextManager[ObjectWriter]:
        """A writer for one object. It appears, durable and in one step, when the block ends; it never appears when the
        block is left by an error. `expected_bytes` lets S3 choose its part size; objects under 150 GB need no hint."""

    @abstractmethod
    def info(self, name: str) -> ObjectInfo | None:
        """None: there is no such object."""

    @abstractmethod
    def list(self, prefix: str = "") -> Objects:
        """Every object whose name begins with this folder, sorted by name; names are relative to the store."""

    @abstractmethod
    def folders(self, prefix: str = "") -> Names:
        """The names of the folders directly in this one, sorted."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Objects that are not there are none to delete."""

    @abstractmethod
    def check_writable(self, seconds: float | None = None) -> None:
        """Writes a small object and removes it, so that what is wrong is found before it matters. Given seconds, a
        service that does not answer is waited for about so long, and not as long as work that is under way would."""

    @abstractmethod
    def _read_into(self, info: ObjectInfo, begin: int, target: memoryview) -> None:
        """Fills the target from `begin` on, or raises."""

    def read(self, name: str) -> bytes:
        """The whole object."""
        info = self._must(name)
        return bytes(self.read_range(info, 0, info.bytes))

    def read_range(self, info: ObjectInfo, begin: int, end: int) -> Bytes:
        """The bytes from `begin` to before `end` of an object that was asked for before, several pieces at a time where
        they are many; the buffer may be the client's own."""
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
        """An object that was asked for before, from `begin` on, piece by piece; the next pieces are on their way while
        one is used. Where tags tell versions apart (S3), all of it is of the version that `info` names."""
        group = STREAM_BYTES * READS_IN_FLIGHT // 2
        spans = [(at, min(at + group, info.bytes)) for at in range(begin, info.bytes, group)]
        with ThreadPoolExecutor(1) as pool:
            ahead = [pool.submit(self.read_range, info, *span) for span in spans[:1]]
            for following in range(1, len(spans) + 1):
                piece = ahead.pop().result()
                ahead += [pool.submit(self.read_range, info, *span) for span in spans[following : following + 1]]
                yield memoryview(piece)

    def put(self, name: str, content: bytes | str) -> None:
        """A small object."""
        content = content.encode() if isinstance(content, str) else content
        with self.create(name, len(content)) as writer:
            writer.write(content)

    def exists(self, name: str) -> bool:
        return self.info(name) is not None

    def delete_tree(self, folder: str) -> None:
        """Every object below this folder; "" is all of them."""
        self.delete([item.name for item in self.list(folder)])

    def where(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def _read(self, info: ObjectInfo, begin: int, end: int) -> Bytes:
        """One piece, in a buffer of whoever reads it."""
        content = bytearray(end - begin)
        self._read_into(info, begin, memoryview(content))
        return content

    def _must(self, name: str) -> ObjectInfo:
        info = self.info(name)
        if info is None:
            raise ObjectMissingError(f"{self.where(name)} is not there")
        return info


def checked_name(name: str) -> str:
    """A name that stays below its store."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise StorageError(f"{name!r} cannot name an object; give a relative path with single slashes and without ..")
    return name


def as_bytes(data: Bytes) -> memoryview:
    view = data if isinstance(data, memoryview) else memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
