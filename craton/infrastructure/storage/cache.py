"""Local cache of store folders: a file is downloaded at its first use, by one process only.

`mirror(url)` returns the local folder of an `s3://` one. It has the files requested so far, each with the size, version
and, where known, checksum of its object. `CachedFolder.open` downloads one more. An interrupted download resumes; a
corrupt or outdated file is downloaded again. The cache is limited to CRATON_CACHE_BYTES (default: a tenth of the disk
stays free). It evicts the least recently used files first, never one that is open or mapped.

ROOT/objects/NAME-HASH/...                     the files, as below the URL
ROOT/objects/NAME-HASH/.state/source           the URL
ROOT/objects/NAME-HASH/.state/files/FILE.json  state of a file; its mtime is the time of the last request
ROOT/objects/NAME-HASH/.state/files/FILE.part  partial download
ROOT/objects/NAME-HASH/.state/files/FILE.lock  held during download, lookup or removal
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from craton.infrastructure.errors import ObjectMissingError, StorageError
from craton.infrastructure.storage.opening import open_store
from craton.infrastructure.storage.store import ObjectInfo, Store, checked_name

FREE_SHARE = 0.1  # of the disk that stays free without CRATON_CACHE_BYTES
_STATE = ".state"
_SOURCE = f"{_STATE}/source"
_FILES = f"{_STATE}/files"  # a separate folder, so that no file of the store can have the source's name
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
_BOOKED = ""  # the tag of a file whose download has not started: existing bytes are of another version


@dataclass(frozen=True)
class _State:
    """State of a cached file; `crc32` is set once the download is complete."""

    tag: str
    bytes: int
    crc32: int | None = None
    mtime_ns: int = 0

    @property
    def complete(self) -> bool:
        return self.crc32 is not None


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return CRATON_CACHE, else the default cache folder of this system."""
    if cache := environment.get("CRATON_CACHE"):
        return Path(cache).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "craton"


def mirror(url: str, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Return the local folder of a URL with the current version of every wanted file; others are downloaded when
    opened."""
    return CachedFolder(url).mirror(wanted)


def mirror_folder(url: str) -> Path:
    """Where `mirror` puts the files of a URL."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", url.rstrip("/").rpartition("/")[2]) or "bucket"
    return cache_root() / "objects" / f"{name}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:16]}"


class CachedFolder:
    """A folder of a store, read through its mirror. Files returned by `path` stay cached until this process ends."""

    _held: dict[Path, BinaryIO] = {}  # noqa: RUF012 - per process: a path is in use long after its folder is closed

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.root = mirror_folder(self.url)
        self._booked: set[str] = set()  # files whose space was reserved together with others
        self._keep_source()

    @classmethod
    def of(cls, folder: Path) -> tuple[CachedFolder, str] | None:
        """Return the mirror that contains a folder, and the prefix of its file names there; None for any other
        folder."""
        for root in (folder, *folder.parents):
            source = root / _SOURCE
            if source.is_file():
                inside = folder.relative_to(root).as_posix()
                return cls(source.read_text(encoding="utf-8").strip()), "" if inside == "." else f"{inside}/"
        return None

    @cached_property
    def store(self) -> Store:
        return open_store(self.url)

    @cached_property
    def listing(self) -> dict[str, ObjectInfo]:
        """Every file of the store, as of the first request."""
        return {info.name: info for info in self.store.list() if not info.name.startswith(f"{_STATE}/")}

    def mirror(self, wanted: Callable[[str], bool]) -> Path:
        """Return the local folder with the current version of every wanted file."""
        if not self.listing:
            raise ObjectMissingError(f"{self.url}: nothing found; correct the path, or copy the folder there")
        self._remove_unlisted()
        missing = []
        for name in filter(wanted, self.listing):
            if self._is_current(name, None):
                self.path(name)  # so that it is not evicted for the others
            else:
                missing.append(name)
        if missing:
            self._make_room([self.listing[name] for name in missing])
        for name in missing:
            self.path(name)
        return self.root

    def path(self, name: str) -> Path:
        """Return the local path of the file; it stays cached until this process ends."""
        _allow_open_files()
        path = self.root / checked_name(name)
        held, file = self._held.get(path), self.open(name)
        self._held[path] = file
        if held is not None:
            held.close()
        return path

    def open(self, name: str, crc32: int | None = None) -> BinaryIO:
        """Open the file for reading; it stays cached as long as this handle or a mapping of it exists. With a checksum,
        a matching local file is used without a request to the store."""
        checked_name(name)
        with self._locked(name):
            if not self._is_current(name, crc32):
                self._fetch(name, crc32)
            try:
                os.utime(self._state_path(name))
                file = (self.root / name).open("rb")
                fcntl.flock(file, fcntl.LOCK_SH)
            except OSError as error:
                raise _cannot_use(self.root / name, error, "can be read and locked") from error
            return file

    def _remove_unlisted(self) -> None:
        """Remove files whose object no longer exists."""
        for state in sorted((self.root / _FILES).rglob("*.json")):
            name = state.relative_to(self.root / _FILES).as_posix().removesuffix(".json")
            if name not in self.listing:
                with self._locked(name):
                    self._forget(name)

    def _is_current(self, name: str, crc32: int | None) -> bool:
        state = self._state(name)
        if state is None or not state.complete:
            return False
        if crc32 is None:
            info = self.listing.get(name)
            if info is None or (info.tag, info.bytes) != (state.tag, state.bytes):
                return False
        elif crc32 != state.crc32:
            return False
        try:
            status = (self.root / name).stat()
        except FileNotFoundError:
            return False
        if (status.st_size, status.st_mtime_ns) == (state.bytes, state.mtime_ns):
            return True
        return status.st_size == state.bytes and _file_crc32(self.root / name) == state.crc32

    def _fetch(self, name: str, crc32: int | None) -> None:
        info = self.store.info(name)
        if info is None:
            raise ObjectMissingError(f"{self.url}/{name} does not exist")
        part = self._part_path(name)
        part.parent.mkdir(parents=True, exist_ok=True)
        before = self._state(name)
        if before is None or before.complete or (before.tag, before.bytes) != (info.tag, info.bytes):
            part.unlink(missing_ok=True)
        try:
            if name not in self._booked or before is None or before.bytes != info.bytes:
                self._make_room([info])
            self._booked.discard(name)
            self._keep_state(name, _State(info.tag, info.bytes))
            arrived = self._download(info, part)
            if crc32 is not None and arrived != crc32:
                raise StorageError(
                    f"{self.url}/{name} does not match the checksum of its folder; it is corrupt or belongs to "
                    "another version: copy the folder there again"
                )
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, path)
            self._keep_state(name, _State(info.tag, info.bytes, arrived, path.stat().st_mtime_ns))
        except OSError as error:
            raise _cannot_use(self.root, error, f"can be written and has {info.bytes:,} bytes free") from error
        except StorageError:
            if crc32 is not None and part.exists() and part.stat().st_size == info.bytes:
                part.unlink()  # the download is complete and wrong
            raise

    def _download(self, info: ObjectInfo, part: Path) -> int:
        """Resume an earlier download. Return the checksum of the whole file."""
        crc32 = _file_crc32(part) if part.exists() else 0
        with part.open("ab") as file:
            for piece in self.store.stream(info, file.tell()):
                file.write(piece)
                crc32 = zlib.crc32(piece, crc32)
            if file.tell() != info.bytes:
                file.truncate(0)
                raise StorageError(f"{part} changed during the download; try again")
        return crc32

    def _make_room(self, infos: Sequence[ObjectInfo]) -> None:
        """Reserve the bytes of these files, and evict others until they fit. It scans the whole cache, so files that
        are downloaded together are reserved together."""
        objects = cache_root() / "objects"
        booked = {self._state_path(info.name) for info in infos}
        needed = sum(info.bytes for info in infos)
        with _lock_file(objects / "lock"):
            entries = [entry for entry in _entries(objects) if entry.state_path not in booked]
            used = sum(entry.bytes for entry in entries)
            limit = _limit(objects, sum(entry.on_disk() for entry in entries))
            for entry in sorted(entries, key=lambda entry: entry.used_at):
                if used + needed <= limit:
                    break
                if entry.remove():
                    used -= entry.bytes
            if used + needed > limit:
                files = f"{self.url}/{infos[0].name}" + (f" and {len(infos) - 1} more of its files" * (len(infos) > 1))
                raise StorageError(
                    f"{files}: {needed:,} bytes needed, but the cache {objects} is limited to {limit:,}, of which "
                    f"{used:,} are in use; raise CRATON_CACHE_BYTES, or set CRATON_CACHE to a larger disk"
                )
            for info in infos:
                state = self._state(info.name)
                if state is None or (state.tag, state.bytes) != (info.tag, info.bytes):  # else it counts already
                    self._keep_state(info.name, _State(_BOOKED, info.bytes))
        self._booked |= {info.name for info in infos}

    def _forget(self, name: str) -> None:
        for path in (self.root / name, self._part_path(name), self._state_path(name)):
            path.unlink(missing_ok=True)

    def _state(self, name: str) -> _State | None:
        return _read_state(self._state_path(name))

    def _keep_state(self, name: str, state: _State) -> None:
        path = self._state_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(state)), encoding="utf-8")
        os.replace(partial, path)

    def _keep_source(self) -> None:
        source = self.root / _SOURCE
        try:
            if not source.is_file():
                source.parent.mkdir(parents=True, exist_ok=True)
                partial = source.with_name(f"{source.name}.{os.getpid()}")
                partial.write_text(f"{self.url}\n", encoding="utf-8")
                os.replace(partial, source)
        except OSError as error:
            raise _cannot_use(self.root, error, "can be written") from error

    def _state_path(self, name: str) -> Path:
        return self.root / _FILES / f"{name}.json"

    def _part_path(self, name: str) -> Path:
        return self.root / _FILES / f"{name}.part"

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with _lock_file(self.root / _FILES / f"{name}.lock"):
            yield


@dataclass(frozen=True)
class _Entry:
    """One file of the cache, complete or partial, for eviction."""

    root: Path
    name: str
    state: _State
    used_at: float

    @property
    def state_path(self) -> Path:
        return self.root / _FILES / f"{self.name}.json"

    @property
    def bytes(self) -> int:
        return self.state.bytes

    def on_disk(self) -> int:
        path = self.root / self.name if self.state.complete else self.root / _FILES / f"{self.name}.part"
        return path.stat().st_size if path.is_file() else 0

    def remove(self) -> bool:
        """Remove the file unless a process downloads, looks up, reads or maps it."""
        with suppress(BlockingIOError), _lock_file(self.state_path.with_suffix(".lock"), wait=False):
            path = self.root / self.name
            if path.is_file():
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            self.state_path.with_suffix(".part").unlink(missing_ok=True)
            self.state_path.unlink(missing_ok=True)
            return True
        return False


def _entries(objects: Path) -> list[_Entry]:
    result = []
    for path in objects.glob(f"*/{_FILES}/**/*.json"):
        root = objects / path.relative_to(objects).parts[0]
        state = _read_state(path)
        if state is not None:
            name = path.relative_to(root / _FILES).as_posix().removesuffix(".json")
            with suppress(FileNotFoundError):
                result.append(_Entry(root, name, state, path.stat().st_mtime))
    return result


def _limit(objects: Path, on_disk: int) -> int:
    text = os.environ.get("CRATON_CACHE_BYTES")
    if text is None:
        disk = shutil.disk_usage(objects)
        return on_disk + disk.free - int(disk.total * FREE_SHARE)
    if not text.isdigit():
        raise StorageError(f"CRATON_CACHE_BYTES is {text!r}; set it to a whole number of bytes, such as 500000000000")
    return int(text)


def _read_state(path: Path) -> _State | None:
    """Return the state; None if it is missing or corrupt."""
    try:
        return _State(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        if error.errno in _TOO_MANY_OPEN:  # it may exist
            raise _cannot_use(path, error, "can be read") from error
        return None
    except (ValueError, TypeError):
        return None


@contextmanager
def _lock_file(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads; raise BlockingIOError if it is taken and not `wait`."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            raise _cannot_use(path, error, "can be written and locked") from error
        yield


def _allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: an open handle keeps a file in the cache, and the usual
    limit of 1,024 exists for programs that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # if it cannot be raised, opening one file too many reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cannot_use(path: Path, error: OSError, needed: str) -> StorageError:
    if error.errno in _TOO_MANY_OPEN:
        return StorageError(f"{path}: {error.strerror}; raise the limit of open files (ulimit -n)")
    return StorageError(f"{path}: {error.strerror or error}; set CRATON_CACHE to a folder that {needed}")


def _file_crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
