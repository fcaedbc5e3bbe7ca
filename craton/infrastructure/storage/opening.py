"""Open a store (a folder or S3), and copy a finished folder from one store to another.

A copy of an exported model or of shards is complete once its seal exists (`seal`: config.json of a model, index.json of
shards), which is written last. A folder with a seal is never written to; an interrupted copy starts over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from craton.infrastructure.errors import StorageError
from craton.infrastructure.storage.folder import FolderStore
from craton.infrastructure.storage.store import ObjectInfo, Store
from craton.remote import is_url

FILES_IN_FLIGHT = 4


def open_store(place: str | Path) -> Store:
    """Open a folder, or `s3://bucket/prefix` with credentials and endpoint from the usual AWS environment. Opening uses
    no network and creates no folder; `check_writable` tests whether the store can be used."""
    if not is_url(place):
        return FolderStore(Path(place))
    scheme = str(place).partition("://")[0]
    if scheme != "s3":
        raise StorageError(f"{place}: {scheme}:// is not a store; give a folder or s3://bucket/prefix")
    from craton.infrastructure.storage.s3 import S3Store  # obstore is an extra

    return S3Store(str(place))


def copy_down(source: Path | str, target: Path | str, seal: str) -> None:
    """Copy every file of the source folder, `seal` last. Raise StorageError if the target already has the seal."""
    here, there = open_store(source), open_store(target)
    files = {info.name: info for info in here.list()}
    if not files:
        raise StorageError(f"{here.url} is empty, so there is nothing to copy; check the path")
    if seal not in files:
        raise StorageError(f"{here.url} has no {seal}, so it is incomplete; copy a complete one")
    if there.exists(seal):
        raise StorageError(f"{there.url} already has a complete copy; remove it first, or copy to another place")
    last = files.pop(seal)
    with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
        for _ in pool.map(lambda info: _copy(here, there, info), files.values()):
            pass
    _copy(here, there, last)


def _copy(source: Store, target: Store, info: ObjectInfo) -> None:
    with target.create(info.name, info.bytes) as writer:
        for piece in source.stream(info):
            writer.write(piece)
