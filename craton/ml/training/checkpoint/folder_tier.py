"""The steps of a run on a file system: shared, or on each node's own disk."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch

from craton.infrastructure.storage import GrowingFile, sync_folder
from craton.ml.training.checkpoint.checksums import COMPLETE, CheckpointError, Seal
from craton.ml.training.checkpoint.tiers import (
    OWNER,
    StepFiles,
    StepWriter,
    TierFolder,
    check_owner,
    step_name,
    step_of,
)
from craton.telemetry.files import first_link, open_regular

_LEFTOVER = re.compile(r"step-[0-9]{8,}\.(partial|removed)")


class FolderTier:
    """Steps on a file system. A node-local tier has a folder for each node: one machine may be several nodes, or may
    have been another node when the step was written."""

    def __init__(self, folder: TierFolder) -> None:
        self.folder = folder
        self._base = Path(folder.path)
        self._root = self._base / folder.node if folder.node else self._base
        self._below = folder.run or self._base  # no link is followed below it

    def prepare(self) -> None:
        self._check_links()
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._root) as file:
            file.write(b"\0")
        if self.folder.owner is not None:
            path = self._root / OWNER
            if check_owner(self.folder, path.read_text(encoding="utf-8") if path.is_file() else None):
                _write_synced(path, self.folder.owner.encode())

    def steps(self) -> list[int]:
        """Includes links: opening one raises an error."""
        steps = {step_of(entry.name) for root in self._roots() for entry in os.scandir(root) if _is_step(entry)}
        return sorted((step for step in steps if step is not None), reverse=True)

    def complete_steps(self) -> list[int]:
        return [step for step in self.steps() if any(files.size(COMPLETE) is not None for files in self._parts(step))]

    def open(self, step: int) -> list[StepFiles]:
        parts = self._parts(step)
        if not parts:
            for root in self._roots():
                if (path := root / step_name(step)).is_symlink():
                    raise CheckpointError(f"{path} is a symbolic link, which is not followed; move the folder here")
        return list(parts)

    def write(self, step: int) -> StepWriter:
        return FolderWriter(self._root / step_name(step), all_seen=self.folder.node is None)

    def remove(self, step: int) -> None:
        for root in self._roots():
            folder = root / step_name(step)
            removed = folder.with_name(f"{folder.name}.removed")
            with suppress(FileNotFoundError):  # another node of this machine was faster
                folder.rename(removed)  # removes it atomically, whatever happens to the files
            shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> list[str]:
        for root in self._roots():
            for whole in root.glob(f"step-*.partial/{COMPLETE}"):  # interrupted between two renames, with nothing lost
                with suppress(OSError):
                    whole.parent.rename(whole.parent.with_suffix(""))
        left = [entry for root in self._roots() for entry in root.iterdir() if _LEFTOVER.fullmatch(entry.name)]
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True)
        return sorted({entry.name for entry in left})

    def _parts(self, step: int) -> list[FolderFiles]:
        paths = [root / step_name(step) for root in self._roots()]
        return [FolderFiles(path, self._below) for path in paths if _is_folder(path)]

    def _roots(self) -> list[Path]:
        """Return the folders; CheckpointError if one is a link."""
        self._check_links()
        mine = [self._root] if self._root.is_dir() else []
        if self.folder.node is None:
            return mine
        others = sorted(self._base.iterdir()) if self._base.is_dir() else []
        return mine + [root for root in others if _is_folder(root) and root != self._root]

    def _check_links(self) -> None:
        if (link := first_link(self._root, self._below)) is not None:
            raise CheckpointError(
                f"{link} is a symbolic link, which is not followed; move the folder here, or add the target "
                "of the link as a separate tier"
            )


class FolderFiles:
    """The finished files of one folder: regular files, neither links nor pipes, with no link in the path `below`."""

    def __init__(self, path: Path, below: Path) -> None:
        self.path, self.where = path, str(path)
        self._below = below

    def size(self, name: str) -> int | None:
        try:
            status = (self.path / name).lstat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        try:
            with open_regular(self.path / name, self._below) as buffered:
                file = cast(FileIO, buffered.raw)
                length = (os.fstat(file.fileno()).st_size if end is None else end) - begin
                view, count = memoryview(torch.empty(length, dtype=torch.uint8).numpy().data), 0  # not zeroed first
                file.seek(begin)
                while num_read := file.readinto(view[count:]):
                    count += num_read
                return view[:count]
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error


class FolderWriter:
    """Writes step-N.partial, until it is complete."""

    def __init__(self, path: Path, all_seen: bool) -> None:
        self.path, self.where, self._all_seen = path, str(path), all_seen
        self._partial = path.with_name(f"{path.name}.partial")

    def begin(self, leads: bool) -> None:
        # The tier's own folder is not re-created: if it is gone, so is its file system.
        if self._partial.is_symlink():
            raise CheckpointError(f"{self._partial} is a symbolic link, which is not followed; remove it")
        self._partial.mkdir(exist_ok=True)

    @contextmanager
    def create(self, name: str) -> Iterator[GrowingFile]:
        with open(self._partial / name, "wb", buffering=0, opener=_open_new) as file:
            yield GrowingFile(file.fileno())
            os.fsync(file.fileno())

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path.parent).free if self._all_seen else None  # else only this node's

    def finish(self, seal: Seal) -> None:
        if self._all_seen:
            self._check(seal)
        for name, text in seal.texts().items():
            _write_synced(self._partial / name, text)
        sync_folder(self._partial)
        removed = self.path.with_name(f"{self.path.name}.removed")
        if self.path.exists():  # the same step of an abandoned course: replace it
            self.path.rename(removed)
        self._partial.rename(self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(removed, ignore_errors=True)

    def abandon(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def _check(self, seal: Seal) -> None:
        for name, expected in seal.files.items():
            path = self._partial / name
            if not path.is_file() or path.stat().st_size != expected.bytes:
                raise CheckpointError(
                    f"{path} was written by another rank and is not visible here; every rank must write to the same "
                    f"file system: use a folder that all nodes share"
                )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_step(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() or entry.is_symlink()


def _open_new(path: str, flags: int) -> int:
    """Open without following a link or waiting for the reader of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _write_synced(path: Path, text: bytes) -> None:
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
