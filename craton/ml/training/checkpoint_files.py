"""A checkpoint as files: TIER/step-00000200 holds DCP's shards and `.metadata`, `checksums.json` and COMPLETE.

A folder under its final name is whole: it is written as `step-N.partial`, synced, given COMPLETE last and renamed in
one step; it leaves by a rename to `step-N.removed`. So whatever ends in .partial or .removed was cut off and can go.
Every file's crc32 is known from the bytes that were written, not from a second look at the disk.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from craton.errors import CratonError

COMPLETE = "COMPLETE"
CHECKSUMS = "checksums.json"
READ_BYTES = 8 * 2**20
FRAME_BYTES = 4096  # what a file needs around one tensor, generously: the archive's header, index and alignment
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(partial|removed)")


class CheckpointError(CratonError):
    """A checkpoint could not be written or read."""


class DifferentModelError(CheckpointError):
    """A checkpoint is whole, but belongs to another model or another optimizer."""


@dataclasses.dataclass(frozen=True)
class TierFolder:
    """A folder that all ranks see, and how often it is written; with neither interval, only when there is a reason
    to save (a stop, the end). `keep` None keeps every checkpoint."""

    name: str
    path: Path
    every_seconds: float | None = None
    every_steps: int | None = None
    keep: int | None = None


@dataclasses.dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    crc32: int
    bytes: int


def step_folder(path: Path, step: int) -> Path:
    """Where a step lies in the folder of a tier."""
    return path / f"step-{step:08d}"


def partial_folder(folder: Path) -> Path:
    """Where it is written until it is whole."""
    return folder.with_name(f"{folder.name}.partial")


def steps_in(path: Path) -> list[int]:
    """The steps under their final names, newest first; whether each is whole is for `read_seal` to say."""
    if not path.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def candidates(tiers: Sequence[TierFolder]) -> list[tuple[int, str, Path]]:
    """Newest first; of equal steps the tier that is named first, which is the fastest."""
    found = [
        (-step, index, step_folder(tier.path, step)) for index, tier in enumerate(tiers) for step in steps_in(tier.path)
    ]
    return [(-negative, tiers[index].name, folder) for negative, index, folder in sorted(found)]


def is_complete(folder: Path) -> bool:
    """Whether it was finished; its files may have been harmed since."""
    return (folder / COMPLETE).is_file()


def remove_leftovers(path: Path) -> list[str]:
    """Removes what a killed save or removal left behind, and names it."""
    if not path.is_dir():
        return []
    left = sorted(entry.name for entry in path.iterdir() if _LEFTOVER.fullmatch(entry.name))
    for name in left:
        shutil.rmtree(path / name, ignore_errors=True)
    return left


def seal(folder: Path, sums: Mapping[str, FileSum], about: Mapping[str, Any]) -> None:
    """Turns `folder`.partial, whose files are written and synced, into the finished checkpoint."""
    partial = partial_folder(folder)
    for name, expected in sums.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != expected.bytes:
            raise CheckpointError(
                f"{path} was written by another rank and cannot be seen here; every rank must write to the same file "
                f"system, so give the tier a folder that all nodes share"
            )
    table = {name: dataclasses.asdict(file) for name, file in sorted(sums.items())}
    _write_synced(partial / CHECKSUMS, json.dumps({"files": table}, indent=1))
    _write_synced(partial / COMPLETE, json.dumps(dict(about), indent=1))
    _sync_folder(partial)
    removed = folder.with_name(f"{folder.name}.removed")
    if folder.exists():  # the same step of an abandoned course: replaced
        folder.rename(removed)
    partial.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(removed, ignore_errors=True)


def retain(path: Path, keep: int | None) -> None:
    """Leaves the `keep` newest checkpoints that are COMPLETE, and the incomplete ones for someone to look at."""
    if keep is None:
        return
    complete = [step for step in steps_in(path) if is_complete(step_folder(path, step))]
    for step in complete[max(keep, 1) :]:
        folder = step_folder(path, step)
        removed = folder.with_name(f"{folder.name}.removed")
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def read_seal(folder: Path) -> tuple[dict[str, Any], dict[str, FileSum]]:
    """What COMPLETE and checksums.json say; CheckpointError when they are missing or are not ours."""
    try:
        about = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        table = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        sums = {name: FileSum(int(file["crc32"]), int(file["bytes"])) for name, file in table["files"].items()}
        about["step"], about["counters"] = int(about["step"]), dict(about["counters"])
    except FileNotFoundError as missing:
        raise CheckpointError(f"{Path(missing.filename).name} is missing, so it was never finished") from missing
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{COMPLETE} or {CHECKSUMS} cannot be read: {error}") from error
    return about, sums


def damage(folder: Path, sums: Mapping[str, FileSum], threads: int = 1) -> list[str]:
    """What is wrong with these files, one line for each that is missing, torn or changed."""
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda item: _file_damage(folder / item[0], item[1]), sums.items())
        return [line for line in found if line]


def shapes_in(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The names, shapes and types of a checkpoint's tensors."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def ignore_single_process_warning() -> None:
    """DCP warns whenever it works without a process group, which is what a single rank means to do."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)


class CheckedWriter(FileSystemWriter):
    """DCP's file writer, with as many files and threads a rank as asked, which looks for room before it writes, knows
    the crc32 of what it wrote, and reports a full disk as one: an archive that cannot go on says something else."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__(".", per_thread_copy_ahead=0)
        self.fs = self._files = _SummedFiles()
        self.threads = threads
        self.free_bytes = 0  # at the beginning of the save, where this rank coordinates it
        self._rank_bytes: dict[int, int] = {}

    @property
    def sums(self) -> dict[str, FileSum]:
        """Of this rank's files of this save."""
        return self._files.sums

    @property
    def needed_bytes(self) -> int:
        """Of all ranks together, known where the save is coordinated."""
        return sum(self._rank_bytes.values())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._files.sums = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        for rank, plan in enumerate(plans):
            if plan.usable:  # otherwise it is the plan of the save before
                self._rank_bytes[rank] = sum(_item_bytes(item) for item in plan.items)
        self.free_bytes = shutil.disk_usage(self.path).free
        if self.needed_bytes > self.free_bytes:
            raise CheckpointError("there is not enough room; nothing was written")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # FileSystemWriter's own threads lose what they raise: a full disk would look like a whole checkpoint.
        parts = _even_parts(plan.items, self.threads, _item_bytes)
        plans = [
            dataclasses.replace(
                plan,
                items=part,
                storage_data=dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{index}_"),
            )
            for index, part in enumerate(parts)
        ]
        write = super().write_data
        with ThreadPoolExecutor(self.threads) as pool:
            written = list(pool.map(lambda part: write(part, planner).wait(), plans))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done


class ThreadedReader(FileSystemReader):
    """DCP's file reader with several files in flight."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        super().__init__(folder)
        self.threads = threads

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda items: read(dataclasses.replace(plan, items=items), planner).wait(), by_file.values()))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _SummedFiles(FileSystem):
    """Files whose checksum is known when they are closed."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode) as file:
            stream = _SummedStream(file)
            try:
                yield stream
            except RuntimeError:
                if stream.error is not None:
                    raise stream.error from None
                raise
            stream.close()
            file.close()
            self.sums[Path(path).name] = FileSum(stream.crc32, stream.position)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummedStream(io.RawIOBase):
    """Counts and sums what goes through, and remembers why a write failed."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.crc32, self.position = file, 0, 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        length = memoryview(data).nbytes
        self.position += length
        return length

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        self.file.flush()
        return int(self.file.fileno())


def _file_damage(path: Path, expected: FileSum) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size:,} bytes instead of {expected.bytes:,}"
        crc32 = 0
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(min(READ_BYTES, max(size, 1)))
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                crc32 = zlib.crc32(view[:count], crc32)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    return None if crc32 == expected.crc32 else f"{path.name} has another checksum than when it was written"


def _item_bytes(item: Any) -> int:
    count = 1
    for size in item.tensor_data.chunk.sizes:
        count *= size
    return count * int(item.tensor_data.properties.dtype.itemsize) + FRAME_BYTES


def _even_parts(items: Sequence[Any], parts: int, size: Callable[[Any], int]) -> list[list[Any]]:
    """Non-empty parts of about the same size, at least one."""
    result: list[list[Any]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for item in sorted(items, key=size, reverse=True):
        smallest = filled.index(min(filled))
        result[smallest].append(item)
        filled[smallest] += size(item)
    return [part for part in result if part] or [[]]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
