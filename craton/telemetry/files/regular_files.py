"""Read the files of a run directory that another user may have written.

On a shared root anyone can plant a FIFO, a device, a link to a private file or a terabyte of zeros where a run has a
file. Every reader of run directories opens its files here, so that
- no reader blocks: a FIFO, a socket, a device or a folder instead of a file raises `UnsafeFileError`;
- no reader leaves the run: links below the run directory are not followed. The run directory itself may be a link;
- no reader fills the memory: documents, lines and lists of names have a maximum size.

`UnsafeFileError` is an OSError, so readers that tolerate a missing file tolerate it too; `noting_unread` collects them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path

MAX_DOCUMENT_BYTES = 64 << 20  # launch.json of 10,000 nodes has 2 MiB
MAX_NAMES = 200_000  # in one folder: twice the logs of a run with 100,000 ranks
# Folders of a run whose files are opened by path: below these and below the run itself no link is followed.
RUN_FOLDERS = frozenset(
    {"events", "metrics", "ledger", "logs", "traces", "heartbeat", "status", "generations", "plans", "chaos", "track"}
    | {"hosts", "preflight", "unfit", "members", "samples"}
)
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}
_unread: ContextVar[dict[Path, OSError] | None] = ContextVar("unread", default=None)


class UnsafeFileError(OSError):
    """A file of a run is not a regular file, or is too large."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


@contextmanager
def noting_unread() -> Iterator[dict[Path, OSError]]:
    """Collect files that cannot be read (path → error) instead of raising; they count as empty. For readers that must
    show a run even while its file system fails."""
    noted: dict[Path, OSError] = {}
    token = _unread.set(noted)
    try:
        yield noted
    finally:
        _unread.reset(token)


def note_unread(path: Path, error: OSError) -> bool:
    """Note a file that cannot be read; False if no caller collects notes."""
    noted = _unread.get()
    if noted is None:
        return False
    noted[path] = error
    return True


def open_regular(path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None) -> BufferedReader:
    """Open a regular file of a run for reading, without waiting and without following a link below the run directory.

    `below` is the run directory; without it, the parent of `path`, or the parent of one of RUN_FOLDERS.
    """
    descriptor = _open(path, below, _FILE_FLAGS)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UnsafeFileError(path, f"is {_kind(mode)}, not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def append_regular(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Open a regular file of a run for appending, and create it if missing. Does not block on a planted FIFO, and does
    not write through a link."""
    flags |= os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV, errno.EISDIR):
            raise
        raise UnsafeFileError(path, f"is {_kind(os.lstat(path).st_mode)}, not a regular file") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnsafeFileError(path, f"is {_kind(mode)}, not a regular file")
    os.set_blocking(descriptor, True)
    return descriptor


def read_regular(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_DOCUMENT_BYTES,
    below: str | os.PathLike[str] | None = None,
) -> bytes:
    """Return the content of a regular file of a run; UnsafeFileError if it has more than `max_bytes`."""
    with open_regular(path, below) as file:
        # A size of 0 is what files of /proc and some network file systems report: the read decides.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(path, f"has more than {max_bytes:,} bytes, the maximum for this file")
    return content


def read_regular_text(path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None) -> str:
    """Like `read_regular`, as text; ValueError if it is not UTF-8."""
    return read_regular(path, below=below).decode()


def names_in(
    folder: str | os.PathLike[str], pattern: str = "*", below: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the sorted names in a folder of a run that match a pattern; none if there is no folder.

    The folder must not be a link, unless it is the run directory. More than MAX_NAMES names raise UnsafeFileError.
    """
    try:
        descriptor = _open(folder, below or os.path.dirname(folder), _FOLDER_FLAGS)
    except FileNotFoundError:
        return []
    try:
        names = []
        with os.scandir(descriptor) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_NAMES:
                    raise UnsafeFileError(
                        folder, f"has more than {MAX_NAMES:,} files, the maximum for a folder of a run"
                    )
                if fnmatchcase(entry.name, pattern):
                    names.append(entry.name)
    finally:
        os.close(descriptor)
    return sorted(names)


def paths_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Like `names_in`, as paths. A folder that cannot be listed is noted if notes are collected."""
    try:
        return [folder / name for name in names_in(folder, pattern)]
    except OSError as error:
        if not note_unread(folder, error):
            raise
        return []


def first_link(path: str | os.PathLike[str], below: str | os.PathLike[str]) -> str | None:
    """Return the first link in `path` below the run directory; None: there is none, or no such path."""
    here, parts = _split(os.fspath(path), below)
    for part in parts:
        here = os.path.join(here, part)
        if os.path.islink(here):
            return here
    return None


def _open(path: str | os.PathLike[str], below: str | os.PathLike[str] | None, flags: int) -> int:
    """Open `path`. Each component below the run directory is opened separately, so that none is a link."""
    base, parts = _split(os.fspath(path), below)
    if not parts or ".." in parts:
        raise UnsafeFileError(path, f"is not below {base}")
    if len(parts) == 1:
        return _open_at(os.path.join(base, parts[0]), None, flags, path)
    here = _open_at(os.path.join(base, parts[0]), None, _FOLDER_FLAGS, path)
    try:
        for folder in parts[1:-1]:
            inner = _open_at(folder, here, _FOLDER_FLAGS, path)
            os.close(here)
            here = inner
        return _open_at(parts[-1], here, flags, path)
    finally:
        os.close(here)


def _split(path: str, below: str | os.PathLike[str] | None) -> tuple[str, list[str]]:
    """Return the run directory and the components below it."""
    if below is None:
        folder, name = os.path.split(path)
        run, inner = os.path.split(folder)
        return (run, [inner, name]) if inner in RUN_FOLDERS else (folder, [name])
    base = os.fspath(below)
    inside = path.removeprefix(base.rstrip(os.sep) + os.sep)
    return base, [] if inside == path else [part for part in inside.split(os.sep) if part not in ("", ".")]


def _open_at(name: str, folder: int | None, flags: int, path: str | os.PathLike[str]) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        # ELOOP and, for a folder, ENOTDIR: a link; ENXIO: a socket; ENODEV: a device without a driver.
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO, errno.ENODEV):
            raise
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except OSError:
            raise error from None
        here = os.path.basename(name)
        place = "" if here == os.path.basename(path) else f"is inside {here}, which "
        wanted = "a regular file" if not flags & os.O_DIRECTORY else "a folder"
        raise UnsafeFileError(path, f"{place}is {_kind(mode)}, not {wanted}") from None


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a regular file" if stat.S_ISREG(mode) else "something else")
