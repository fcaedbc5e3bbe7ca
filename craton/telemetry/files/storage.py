"""Files of a run on failing storage: atomic replacement, diagnosis, and output that never raises.

A run must survive a failing disk under its directory. `replace_text` leaves either the old or the new text.
`storage_problem` reports what is full, read-only or gone, how much is free and what to do. `protect_output` makes the
prints of this process safe: text that a full disk refuses waits in bounded memory, in order.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import sys
import threading
from pathlib import Path

from craton import formatting

# Errors after which storage may accept writes again later.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
FULL_BYTES = 64 << 10  # a disk with fewer free bytes counts as full
OUTPUT_BYTES = 1 << 20  # of printed text that waits for disk space


def replace_text(
    path: Path, text: str, durable: bool = True, in_place: bool = False, modified_at: float | None = None
) -> None:
    """Replace a file as a whole, with `durable` also across a power loss. OSError leaves the old text and no new file.
    `modified_at` is the time of the new text in epoch seconds; the file system's own time otherwise.

    `in_place` overwrites the old text if there is no space for a second file: that needs no new block. Only for files
    whose readers ignore a half-written text.
    """
    replace_bytes(path, text.encode(), durable, in_place, modified_at)


def replace_bytes(
    path: Path, data: bytes, durable: bool = True, in_place: bool = False, modified_at: float | None = None
) -> None:
    """Do the same with bytes."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(descriptor, data)
            if modified_at is not None:
                os.utime(descriptor, (modified_at, modified_at))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        if not in_place or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _overwrite(path, data)
        if modified_at is not None:
            os.utime(path, (modified_at, modified_at))


def storage_problem(path: Path) -> str:
    """Return what is wrong with the storage of a run directory and the remedy, in one sentence; "" if nothing."""
    try:
        mount = os.statvfs(path)
    except FileNotFoundError:
        return f"{path} is gone: it was removed, or its file system is not mounted"
    except OSError as error:
        return f"{path} cannot be reached ({error.strerror}): check the mount of its file system"
    if mount.f_flag & os.ST_RDONLY:
        return f"{path} is read-only: make its file system writable again (`mount -o remount,rw`)"
    free_bytes = mount.f_bavail * mount.f_frsize
    if free_bytes < FULL_BYTES:
        return (
            f"the file system of {path} is full: {formatting.stored(free_bytes)} are free; remove files or enlarge it"
        )
    if mount.f_files and not mount.f_favail:
        return f"the file system of {path} has no free inodes ({formatting.stored(free_bytes)} are free); remove files"
    return ""


def protect_output() -> None:
    """Make `print`, warnings and tracebacks of this process safe on a full or failing disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(getattr(stream, "buffer", None), SafeOutput):
            continue
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            raw = SafeOutput(stream.fileno())
            os.register_at_fork(after_in_child=raw.forked)
            text = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[type-var]
            setattr(sys, name, text)


class SafeOutput(io.RawIOBase):
    """Writes to a descriptor and never raises. Refused text waits and is written first at the next write; beyond
    OUTPUT_BYTES the oldest text is dropped, and a line reports how much."""

    def __init__(self, descriptor: int, most_bytes: int = OUTPUT_BYTES) -> None:
        super().__init__()
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._waiting = b""
        self._dropped_bytes = 0
        self._lock = threading.RLock()  # a signal handler may print too

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def forked(self) -> None:
        """Reset in a forked process: a missing thread may hold the lock, and the parent prints the waiting text."""
        self._lock, self._waiting, self._dropped_bytes = threading.RLock(), b"", 0

    def write(self, data: object) -> int:
        new = bytes(data)  # type: ignore[call-overload]
        with self._lock:
            self._waiting += new
            try:
                self._send()
            except OSError:
                self._trim()
        return len(new)

    def flush(self) -> None:
        """Retry writing the waiting text."""
        if self._waiting:
            self.write(b"")

    def _send(self) -> None:
        if self._dropped_bytes:
            note = f"\n[craton: {self._dropped_bytes:,} bytes of output were dropped while the disk accepted none]\n"
            _write_all(self._descriptor, note.encode())
            self._dropped_bytes = 0
        while self._waiting:
            self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]

    def _trim(self) -> None:
        excess = len(self._waiting) - self._most_bytes
        if excess > 0:
            self._dropped_bytes += excess
            self._waiting = self._waiting[excess:]


def _overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file without a new block; the rest of a longer old text becomes spaces. OSError, and the old text
    stays, if the new text would need a block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        old = os.fstat(descriptor)
        if len(data) > max(old.st_size, old.st_blocks * 512):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        padding = b" " * (old.st_size - len(data))
        _write_all(descriptor, data.rstrip(b"\n") + padding + b"\n" if padding else data)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
