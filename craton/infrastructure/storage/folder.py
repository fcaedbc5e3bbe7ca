"""A folder as a store: an object is written to a temporary file beside its place, synced, and renamed when complete.

The writer holds a lock on the unfinished file, so that one left by a killed process is recognised and removed when the
same object is written again or its folder deleted. Unfinished files are never listed. A folder that disappears is an
error and is not created again: its file system is gone too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from craton.infrastructure.errors import ObjectMissingError, StorageError
from craton.infrastructure.storage.store import (
    Bytes,
    Names,
    ObjectInfo,
    Objects,
    ObjectWriter,
    Store,
    as_bytes,
    checked_name,
)

WRITE_BYTES = 8 * 2**20  # per write, and before write-back is requested
_UNFINISHED = ".unfinished"
_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full; free some space or give another folder",
    errno.EDQUOT: "the quota is used up; free some space or give another folder",
    errno.EROFS: "the file system is read-only; remount it writable or give another folder",
    errno.EACCES: "permission denied; change its permissions or give another folder",
    errno.EPERM: "permission denied; change its permissions or give another folder",
    errno.ENOTDIR: "a part of this path is a file; give another folder",
    errno.ESTALE: "stale file handle: the file server lost it; mount it again",
    errno.EIO: "the device reports I/O errors; check the kernel log",
    errno.ENOENT: "it has vanished; is its file system still mounted?",
}


class FolderStore(Store):
    """Objects are files below one folder, which is created at the first write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)
        self._was_there = path.is_dir()

    @contextmanager
    def create(self, name: str, expected_bytes: int = 0) -> Iterator[ObjectWriter]:
        path = self._path(name)
        with _as_storage_error(path):
            self._make_folder(path.parent)
            _remove_abandoned(path)
            unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor)
            yield _ObjectFile(descriptor, path)
            with _as_storage_error(path):
                os.fsync(descriptor)
                os.rename(unfinished, path)
                sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def info(self, name: str) -> ObjectInfo | None:
        path = self._path(name)
        with _as_storage_error(path):
            try:
                return _info(name, path.stat()) if path.is_file() else None
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Objects:
        root = self._path(prefix) if prefix else self.path
        infos = []
        with _as_storage_error(root):
            for folder, _, files in os.walk(root, onerror=_raise_unless_gone):
                for file in files:
                    path = Path(folder, file)
                    if not file.endswith(_UNFINISHED):
                        with suppress(FileNotFoundError):  # deleted by another process since
                            infos.append(_info(path.relative_to(self.path).as_posix(), path.stat()))
        return sorted(infos, key=lambda info: info.name)

    def folders(self, prefix: str = "") -> Names:
        root = self._path(prefix) if prefix else self.path
        with _as_storage_error(root):
            return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            with _as_storage_error(path):
                path.unlink(missing_ok=True)

    def delete_tree(self, folder: str) -> None:
        root = self._path(folder) if folder else self.path
        with _as_storage_error(root):
            if root.is_dir():
                shutil.rmtree(root)

    def check_writable(self, seconds: float | None = None) -> None:
        name = f".{secrets.token_hex(4)}.check"
        self.put(name, b"\0")
        self.delete([name])

    def _read_into(self, info: ObjectInfo, begin: int, target: memoryview) -> None:
        path = self._path(info.name)
        with _as_storage_error(path), path.open("rb", buffering=0) as file:
            file.seek(begin)
            count = 0
            while count < target.nbytes and (num_read := file.readinto(target[count:])):
                count += num_read
        if count < target.nbytes:
            raise StorageError(f"{path} ends after {begin + count} of {begin + target.nbytes} bytes; write it again")

    def _path(self, name: str) -> Path:
        return self.path / checked_name(name)

    def _make_folder(self, folder: Path) -> None:
        if self._was_there and not self.path.is_dir():
            raise StorageError(f"{self.path} has vanished; is its file system still mounted?")
        folder.mkdir(parents=True, exist_ok=True)
        self._was_there = True


class GrowingFile:
    """Write to a new file and start write-back early, so that the caller's final sync has little to do."""

    def __init__(self, descriptor: int) -> None:
        self.bytes = 0
        self._descriptor, self._begun = descriptor, 0

    def write(self, data: Bytes) -> None:
        view = as_bytes(data)
        while view.nbytes:
            count = os.write(self._descriptor, view[:WRITE_BYTES])
            self.bytes += count
            view = view[count:]
            if self.bytes - self._begun >= WRITE_BYTES and hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # Linux writes back dirty pages that are advised to be dropped; others need not
                    os.posix_fadvise(self._descriptor, self._begun, self.bytes - self._begun, os.POSIX_FADV_DONTNEED)
                self._begun = self.bytes


class _ObjectFile(GrowingFile):
    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor)
        self._path = path

    def write(self, data: Bytes) -> None:
        with _as_storage_error(self._path):
            super().write(data)


def _info(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}")


def _lock(descriptor: int) -> None:
    """Mark the writer as alive. On file systems without locks, no file counts as abandoned."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.????????{_UNFINISHED}"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissingError(f"{path}: {_WHAT_TO_DO[errno.ENOENT]}") from error
    except OSError as error:
        reason = _WHAT_TO_DO.get(error.errno or 0, f"{error.strerror or error}; give another folder")
        raise StorageError(f"{path}: {reason}") from error


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def sync_folder(path: Path) -> None:
    """Sync the folder, so that new and changed names survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
