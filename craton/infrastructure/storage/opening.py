"""Which store stands behind a place: a folder, or S3."""

from __future__ import annotations

from pathlib import Path

from craton.infrastructure.errors import StorageError
from craton.infrastructure.storage.folder import FolderStore
from craton.infrastructure.storage.store import Store
from craton.remote import is_url


def open_store(place: str | Path) -> Store:
    """A folder, or `s3://bucket/prefix` with credentials and endpoint from the usual AWS environment. Opening asks
    nothing of the network and makes no folder; `check_writable` finds out whether it can be used."""
    if not is_url(place):
        return FolderStore(Path(place))
    scheme = str(place).partition("://")[0]
    if scheme != "s3":
        raise StorageError(f"{place}: {scheme}:// is not a store; give a folder or s3://bucket/prefix")
    from craton.infrastructure.storage.s3 import S3Store  # obstore is an extra

    return S3Store(str(place))
