"""DCP's writer for any tier: files go to the tier's streams, and their checksums are computed from the bytes as they
are written, without reading them again."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from craton.ml.training.checkpoint.checksums import METADATA, CheckpointError, FileSum, RunningSum
from craton.ml.training.checkpoint.tiers import StepWriter
from craton.telemetry.rank import own_page

SUM_BESIDE_BYTES = 2**20  # from this size on a second thread computes checksums while the first one writes
FRAME_BYTES = 4096  # generous overhead per tensor in a file: the archive's header, index and alignment


def ignore_single_process_warning() -> None:
    """DCP warns when it runs without a process group, which is intended for a single rank."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)


class CheckedWriter(FileSystemWriter):
    """DCP's file writer, with a given number of files and threads per rank. It checks for room before it writes, knows
    the crc32 of what it wrote, and reports a full disk as such: torch's archive raises a different error."""

    def __init__(self, threads: int, tier: str = "") -> None:
        super().__init__(".", sync_files=False, per_thread_copy_ahead=0)  # the tier's streams sync on close
        self.threads, self._tier = threads, tier
        self.sums: dict[str, FileSum] = {}  # of this rank's files of this save
        self.metadata = b""  # of all ranks' tensors, on the coordinator
        self.free_bytes: int | None = None  # at the beginning of the save, on the coordinator
        self.own_bytes = 0  # of this rank, in the save in progress
        self._rank_bytes: dict[int, int] = {}
        self._summing = ThreadPoolExecutor(threads, thread_name_prefix="sums")
        self._target: StepWriter | None = None

    @property
    def needed_bytes(self) -> int:
        """Of all ranks together, known on the coordinator."""
        return sum(self._rank_bytes.values())

    @property
    def written_bytes(self) -> int:
        """Of this rank, in the save in progress."""
        return self.fs.written_bytes if isinstance(self.fs, _SummedFiles) else 0

    def aim(self, target: StepWriter) -> None:
        """Set the target of the next save."""
        self._target = target
        self.sums, self.own_bytes = {}, 0
        self.fs = _SummedFiles(target, self.sums, self._summing, self._tier)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._leads = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert self._target is not None
        self._target.begin(self._leads)
        return plan

    def close(self) -> None:
        self._summing.shutdown()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self._target is not None
        for rank, plan in enumerate(plans):
            if plan.usable:  # otherwise it is the plan of the previous save
                self._rank_bytes[rank] = sum(_item_bytes(item) for item in plan.items)
        self.free_bytes = self._target.free_bytes()
        if self.free_bytes is not None and self.needed_bytes > self.free_bytes:
            raise CheckpointError("there is not enough free space")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.own_bytes = sum(_item_bytes(item) for item in plan.items)
        # FileSystemWriter's own threads swallow exceptions: a full disk would look like a complete checkpoint.
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

        def write_part(part: SavePlan) -> list[WriteResult]:
            with without_archive_sums:
                return write(part, planner).wait()

        with ThreadPoolExecutor(self.threads) as pool:
            written = list(pool.map(write_part, plans))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._target is not None
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        self.metadata = pickle.dumps(metadata)
        with self.fs.create_stream(METADATA, "wb") as stream:
            stream.write(self.metadata)


class _SummedFiles(FileSystem):
    """Files of a step whose checksums are known when they are closed."""

    def __init__(self, target: StepWriter, sums: dict[str, FileSum], summing: ThreadPoolExecutor, tier: str) -> None:
        self._target, self._sums, self._summing, self._tier = target, sums, summing, tier
        self._streams: list[_SummedStream] = []

    @property
    def written_bytes(self) -> int:
        return sum(stream.sum.bytes for stream in tuple(self._streams))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        name = Path(path).name
        page = own_page()
        with self._target.create(name) as file:
            if page is not None and (delay := page.write_delay(self._tier)):
                time.sleep(delay)  # `craton chaos --slow-disk`
            stream = _SummedStream(file.write, self._summing)
            self._streams.append(stream)
            try:
                yield stream
            except RuntimeError:
                if stream.error is not None:
                    raise stream.error from None
                raise
        self._sums[name] = stream.sum.result()


class _SummedStream(io.RawIOBase):
    """Counts and checksums what passes through, and remembers why a write failed."""

    def __init__(self, write: Callable[[Any], object], summing: ThreadPoolExecutor) -> None:
        super().__init__()
        self._write, self._summing = write, summing
        self.sum = RunningSum()
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        beside = self._summing.submit(self.sum.update, data) if length >= SUM_BESIDE_BYTES else None
        try:
            self._write(data)
        except Exception as error:
            self.error = error  # torch's archive replaces it by another error
            raise
        finally:
            if beside is not None:
                beside.result()  # the caller owns the memory again when this returns
        if beside is None:
            self.sum.update(data)
        if (page := own_page()) is not None and page.kind == "checkpoint":  # training waits for this write
            page.beat()
        return length

    def tell(self) -> int:
        return self.sum.bytes


class _ArchiveSums:
    """Disables torch.save's own checksums inside the context: ours cover the whole file and are three times as fast.
    The switch is per thread, or in older versions of torch per process; several threads of several tiers write at the
    same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = get_crc32_options()
            set_crc32_options(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                set_crc32_options(self._before)


without_archive_sums = _ArchiveSums()


def _item_bytes(item: Any) -> int:
    count = 1
    for size in item.tensor_data.chunk.sizes:
        count *= size
    return count * int(item.tensor_data.properties.dtype.itemsize) + FRAME_BYTES


def _even_parts(items: Sequence[Any], parts: int, size: Callable[[Any], int]) -> list[list[Any]]:
    """Split into non-empty parts of about the same size, at least one."""
    result: list[list[Any]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for item in sorted(items, key=size, reverse=True):
        smallest = filled.index(min(filled))
        result[smallest].append(item)
        filled[smallest] += size(item)
    return [part for part in result if part] or [[]]
