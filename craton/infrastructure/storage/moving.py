"""Bringing a finished folder, a checkpoint's step or an exported model, down to a lower tier.

The copy exists when it is whole: the file that says so (`seal`: COMPLETE, or index.json of shards) is written last, and
checksums.json just before it. Every file is read once, and its crc32 compared on the way with what checksums.json says;
a file that is not what was written is never passed on. A copy that was cut off goes on with the files that are not
there yet, and a target that is complete is left alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from craton.infrastructure.errors import StorageError
from craton.infrastructure.storage.store import ObjectInfo, Store, open_store

COMPLETE = "COMPLETE"
CHECKSUMS = "checksums.json"
FILES_IN_FLIGHT = 4


@dataclass(frozen=True)
class Copied:
    """What a copy did; nothing, when the target had it all."""

    files: int
    bytes: int


def copy_down(
    source: Store | Path | str,
    target: Store | Path | str,
    stop: Callable[[], bool] = lambda: False,
    seal: str = COMPLETE,
) -> Copied:
    """Copies every file of the source folder, `seal` last. A target that has its seal is left as it is, and an error
    where it differs from the source. Asked before each file, `stop` ends it with an error and leaves what is there for
    the next attempt."""
    source = source if isinstance(source, Store) else open_store(source)
    target = target if isinstance(target, Store) else open_store(target)
    files = {info.name: info for info in source.list()}
    if not files:
        raise StorageError(f"{source.url} holds nothing to copy; is it the folder that was meant?")
    there = {info.name: info for info in target.list()}
    if seal not in files:
        raise StorageError(f"{source.url} has no {seal}, so it was never finished; copy one that is whole")
    if seal in there:
        _check_same(source, target, seal, files, there)
        return Copied(0, 0)
    sums = _checksums(source, files)
    if missing := sorted(sums.keys() - files.keys()):
        raise StorageError(f"{source.where(missing[0])} is missing, though {CHECKSUMS} names it; use another copy")
    last = [name for name in (CHECKSUMS, seal) if name in files]
    todo = [name for name in files if name not in last and not _is_copied(target, files[name], there.get(name), sums)]

    def one(name: str) -> int:
        if stop():
            raise StorageError(
                f"{target.url}: the copy was stopped before {name}; it goes on when it is asked for again"
            )
        return _copy(source, target, files[name], sums.get(name))

    with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
        copied = sum(pool.map(one, todo))
    return Copied(len(todo) + len(last), copied + sum(one(name) for name in last))


def _copy(source: Store, target: Store, info: ObjectInfo, expected: int | None) -> int:
    crc32 = 0
    with target.create(info.name, info.bytes) as writer:
        for piece in source.stream(info.name):
            writer.write(piece)
            crc32 = zlib.crc32(piece, crc32)
        if writer.bytes != info.bytes:
            raise StorageError(f"{source.where(info.name)} was changed while it was copied; copy it again")
        if expected is not None and crc32 != expected:
            raise StorageError(
                f"{source.where(info.name)} has another checksum than {CHECKSUMS} says; it was damaged after it was "
                "written and is not copied: use another copy"
            )
    return writer.bytes


def _is_copied(target: Store, info: ObjectInfo, there: ObjectInfo | None, sums: dict[str, int]) -> bool:
    """An object is whole or not there; whether it is this one, its size and checksum say. Without a checksum it is
    copied again."""
    if there is None or there.bytes != info.bytes or info.name not in sums:
        return False
    crc32 = 0
    for piece in target.stream(info.name):
        crc32 = zlib.crc32(piece, crc32)
    return crc32 == sums[info.name]


def _check_same(
    source: Store, target: Store, seal: str, files: dict[str, ObjectInfo], there: dict[str, ObjectInfo]
) -> None:
    """A complete target stays; that it is another one is for its owner to decide."""
    missing = [name for name in files if name not in there or there[name].bytes != files[name].bytes]
    if missing or source.read(seal) != target.read(seal):
        what = f"differs in {missing[0]}" if missing else "is of another save"
        raise StorageError(
            f"{target.url} is complete and {what}; remove it first, or copy {source.url} to another place"
        )


def _checksums(source: Store, files: dict[str, ObjectInfo]) -> dict[str, int]:
    """crc32 by name; nothing, where the folder has no checksums."""
    if CHECKSUMS not in files:
        return {}
    try:
        table = json.loads(bytes(source.read(CHECKSUMS)))
        return {str(name): int(file["crc32"]) for name, file in table["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"{source.where(CHECKSUMS)} cannot be read: {error}; use another copy") from error
