"""The steps of a run as files of a tier: on a file system that all ranks see, on each node's own disk, or in S3.

TIER/step-00000200 holds DCP's shards and `.metadata`, `checksums.json` and, written last, COMPLETE. On a file system a
step is written as `step-N.partial`, synced, and renamed when it is whole; it leaves by a rename to `step-N.removed`. So
whatever ends in .partial or .removed was cut off and can go. S3 has no rename: there a step without COMPLETE was cut
off, and COMPLETE is the first thing to go. Steps are ordered by their number, never by a clock.

Others may write to the same file system: no link is followed inside a tier's folder, nor on the way to it from the run
directory where it lies in there. A tier's folder elsewhere may be a link itself.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from craton.infrastructure import GrowingFile, sync_folder
from craton.ml.training.checkpoint_about import MAX_STEP
from craton.ml.training.checkpoint_sums import CHECKSUMS, COMPLETE, MAX_SEAL_BYTES, CheckpointError, Seal
from craton.remote import is_url
from craton.telemetry import first_link, open_regular

OWNER = "OWNER"  # the run that a tier's folder belongs to, where it lies outside the run directory
_STEP = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.(partial|removed)")


@dataclass(frozen=True)
class TierFolder:
    """A place for checkpoints, and how often it is written; with neither interval, only when there is a reason to save
    (a stop, the end). `keep` None keeps every checkpoint."""

    name: str
    path: Path | str  # a folder, or an s3:// prefix
    every_seconds: float | None = None
    every_steps: int | None = None
    keep: int | None = None
    node: str | None = None  # this rank's node, where the folder is that node's own; None: all ranks see it
    owner: str | None = None  # who may write there; None: anyone
    run: Path | None = None  # the run directory, where the folder lies in it


class StepFiles(Protocol):
    """The files of one step as this rank sees them."""

    where: str

    def size(self, name: str) -> int | None:
        """None: it is not here."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        """Bytes; CheckpointError when they cannot be had."""


class StepWriter(Protocol):
    """One step on its way to a tier."""

    where: str

    def begin(self, leads: bool) -> None:
        """Makes the place; one of the ranks that share it leads."""

    def create(self, name: str) -> Any:
        """A context manager that gives something with `write`; the file is durable when it is left."""

    def free_bytes(self) -> int | None:
        """None: there is no limit that could be known."""

    def finish(self, seal: Seal) -> None:
        """From here on the step exists."""

    def abandon(self) -> None:
        """Removes what was written; never raises."""


class Tier(Protocol):
    """All steps of a run in one place."""

    folder: TierFolder

    def prepare(self) -> None:
        """Makes the place, and finds out whether it can be written."""

    def steps(self) -> list[int]:
        """The steps that are under their final names, newest first; whether each is whole is for its seal to say."""

    def complete_steps(self) -> list[int]: ...

    def open(self, step: int) -> list[StepFiles]:
        """The parts of a step that can be seen here: one, or on a node's own disk those of each node."""

    def write(self, step: int) -> StepWriter: ...

    def remove(self, step: int) -> None: ...

    def remove_leftovers(self) -> list[str]:
        """Removes what a killed save or removal left behind, and names it."""


def open_tier(folder: TierFolder) -> Tier:
    """A folder or S3, as its path says."""
    if is_url(folder.path):
        from craton.ml.training.checkpoint_objects import ObjectTier

        return ObjectTier(folder)
    return FolderTier(folder)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """None where it is not the name of a step, as `step_name` writes it."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step <= MAX_STEP and step_name(step) == name else None


def read_seal(files: StepFiles, step: int) -> Seal:
    """What the step says of itself; CheckpointError when it was never finished, is not ours or is another step."""
    texts = {}
    for name in (COMPLETE, CHECKSUMS):
        if (size := files.size(name)) is not None:
            if size > MAX_SEAL_BYTES[name]:
                raise CheckpointError(f"{name} has {size:,} bytes; at most {MAX_SEAL_BYTES[name]:,} are read")
            texts[name] = bytes(files.read(name, 0, size))
    return Seal.parse(texts, step)


def check_owner(folder: TierFolder, there: str | None) -> bool:
    """Whether nobody owns the place yet; CheckpointError when another run does, whose steps would be lost or taken."""
    if there is not None and there.strip() != folder.owner:
        raise CheckpointError(
            f"{folder.path} holds the checkpoints of another run of this name ({OWNER} says {there.strip()}, this run "
            f"is {folder.owner}); give this run another name, the tier another place, or remove what is there"
        )
    return there is None


def retain(tier: Tier, newest: int) -> None:
    """Leaves the `keep` newest COMPLETE steps up to the one just written, and for someone to look at: incomplete steps,
    and later ones, which could not be restored."""
    if tier.folder.keep is not None:
        for step in [step for step in tier.complete_steps() if step <= newest][max(tier.folder.keep, 1) :]:
            tier.remove(step)


def make_room(tier: Tier, newest: int, missing_bytes: int) -> list[str]:
    """Removes what killed saves left, then the steps that `keep` does not ask for once `newest` is written; their
    names. The last step before `newest` stays, for it is all there is until `newest` is whole. No step is removed where
    all of them together would not make up for the missing bytes."""
    removed = tier.remove_leftovers()
    if tier.folder.keep is None:
        return removed
    spare = [step for step in tier.complete_steps() if step < newest][max(tier.folder.keep - 1, 1) :]
    if sum(_step_bytes(tier, step) for step in spare) < missing_bytes:
        return removed
    for step in spare:
        tier.remove(step)
    return removed + [step_name(step) for step in spare]


def _step_bytes(tier: Tier, step: int) -> int:
    with suppress(CheckpointError):
        return sum(file.bytes for files in tier.open(step)[:1] for file in read_seal(files, step).files.values())
    return 0  # its seal is damaged: what it would free is not known


class FolderTier:
    """Steps on a file system. A node's own disk has a folder for each node: one machine may be several nodes, or what
    was another node when the step was written."""

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
        """Links too: whoever opens one is told."""
        found = {step_of(entry.name) for root in self._roots() for entry in os.scandir(root) if _is_step(entry)}
        return sorted((step for step in found if step is not None), reverse=True)

    def complete_steps(self) -> list[int]:
        return [step for step in self.steps() if any(files.size(COMPLETE) is not None for files in self._parts(step))]

    def open(self, step: int) -> list[StepFiles]:
        parts = self._parts(step)
        if not parts:
            for root in self._roots():
                if (path := root / step_name(step)).is_symlink():
                    raise CheckpointError(f"{path} is a symbolic link, which is not followed; move the folder there")
        return list(parts)

    def write(self, step: int) -> StepWriter:
        return FolderWriter(self._root / step_name(step), all_seen=self.folder.node is None)

    def remove(self, step: int) -> None:
        for root in self._roots():
            folder = root / step_name(step)
            removed = folder.with_name(f"{folder.name}.removed")
            with suppress(FileNotFoundError):  # another node of this machine was faster
                folder.rename(removed)  # so it stops to exist at once, whatever happens to the files
            shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> list[str]:
        for root in self._roots():
            for whole in root.glob(f"step-*.partial/{COMPLETE}"):  # cut off between two renames, with nothing lost
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
        """CheckpointError where a link would lead elsewhere."""
        self._check_links()
        mine = [self._root] if self._root.is_dir() else []
        if self.folder.node is None:
            return mine
        others = sorted(self._base.iterdir()) if self._base.is_dir() else []
        return mine + [root for root in others if _is_folder(root) and root != self._root]

    def _check_links(self) -> None:
        if (link := first_link(self._root, self._below)) is not None:
            raise CheckpointError(
                f"{link} is a symbolic link, which is not followed; move the folder there, or name the place that it "
                "leads to as a tier of its own"
            )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_step(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() or entry.is_symlink()


class FolderFiles:
    """The finished files of one folder: regular files, neither links nor pipes, and no folder `below` is a link."""

    def __init__(self, path: Path, below: Path) -> None:
        self.path, self.where = path, str(path)
        self._below = below

    def size(self, name: str) -> int | None:
        try:
            found = (self.path / name).lstat()
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        try:
            with open_regular(self.path / name, self._below) as buffered:
                file = cast(FileIO, buffered.raw)
                length = (os.fstat(file.fileno()).st_size if end is None else end) - begin
                view, count = memoryview(torch.empty(length, dtype=torch.uint8).numpy().data), 0  # not zeroed first
                file.seek(begin)
                while got := file.readinto(view[count:]):
                    count += got
                return view[:count]
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error


class FolderWriter:
    """step-N.partial, until it is whole."""

    def __init__(self, path: Path, all_seen: bool) -> None:
        self.path, self.where, self._all_seen = path, str(path), all_seen
        self._partial = path.with_name(f"{path.name}.partial")

    def begin(self, leads: bool) -> None:
        # The tier's own folder is not made anew: where it has gone, so has the file system it was on.
        if self._partial.is_symlink():
            raise CheckpointError(f"{self._partial} is a symbolic link, which is not followed; remove it")
        self._partial.mkdir(exist_ok=True)

    @contextmanager
    def create(self, name: str) -> Iterator[GrowingFile]:
        with open(self._partial / name, "wb", buffering=0, opener=_open_new) as file:
            yield GrowingFile(file.fileno())
            os.fsync(file.fileno())

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path.parent).free if self._all_seen else None  # else of this node only

    def finish(self, seal: Seal) -> None:
        if self._all_seen:
            self._check(seal)
        for name, text in seal.texts().items():
            _write_synced(self._partial / name, text)
        sync_folder(self._partial)
        removed = self.path.with_name(f"{self.path.name}.removed")
        if self.path.exists():  # the same step of an abandoned course: replaced
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
                    f"{path} was written by another rank and cannot be seen here; every rank must write to the same "
                    f"file system, so give the tier a folder that all nodes share"
                )


class JoinedFiles:
    """The parts of one step on the disks of several nodes, as far as they are seen here."""

    def __init__(self, parts: Sequence[StepFiles]) -> None:
        self._parts = list(parts)
        self.where = ", ".join(part.where for part in parts)

    def size(self, name: str) -> int | None:
        return next((size for part in self._parts if (size := part.size(name)) is not None), None)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Any:
        part = next(part for part in self._parts if part.size(name) is not None)
        return part.read(name, begin, end)


def _open_new(path: str, flags: int) -> int:
    """Not through a link, nor waiting for the reader of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _write_synced(path: Path, text: bytes) -> None:
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
