"""From the files of a step to tensors: each rank reads the parts of the files that it needs, checks every block against
the seal, and gets from another node what its own disks lack.

Files are read in spans of 16 MiB, several at a time and none twice. A tensor is filled when its last span arrives, and
a span is dropped after its last tensor: beyond the tensors in progress, memory for a few spans is enough.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from craton.ml.training.checkpoint.archive import read_archive
from craton.ml.training.checkpoint.checksums import BLOCK_BYTES, METADATA, CheckpointError, FileSum, changed_block
from craton.ml.training.checkpoint.staging import SavingRanks
from craton.ml.training.checkpoint.tiers import StepFiles

SPAN_BYTES = 2 * BLOCK_BYTES
READS_IN_FLIGHT = 8  # per rank, which does nothing else meanwhile


@dataclass(frozen=True, order=True)
class Span:
    """Consecutive blocks of a file."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class RawPlace:
    """Where the raw bytes of a chunk are. A place without dtype and sizes is an archive of torch.save."""

    relative_path: str
    offset: int
    length: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclass
class SavedItem:
    """A tensor, or a part of one, in a file; and the spans of it that have arrived."""

    item: ReadItem
    name: str
    offset: int
    length: int
    dtype: torch.dtype
    raw: RawPlace | None
    spans: tuple[Span, ...] = ()
    arrived: dict[Span, Any] = field(default_factory=dict)


def shapes_of(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The names, shapes and dtypes of a checkpoint's tensors."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def checked_read(files: StepFiles, name: str, expected: FileSum, begin: int = 0, end: int | None = None) -> Any:
    """Return bytes of a file from block start to block end; CheckpointError names the file and the problem."""
    end = expected.bytes if end is None else end
    size = files.size(name)
    if size is None:
        raise CheckpointError(f"{name} is missing, or not a regular file")
    if size != expected.bytes:
        raise CheckpointError(f"{name} has {size:,} bytes instead of {expected.bytes:,}")
    data = files.read(name, begin, end)
    if len(data) != end - begin:
        raise CheckpointError(f"{name} ended after {begin + len(data):,} of {expected.bytes:,} bytes")
    check_blocks(name, data, expected, begin)
    return data


def check_blocks(name: str, data: Any, expected: FileSum, begin: int) -> None:
    changed = changed_block(data, expected, begin // BLOCK_BYTES)
    if changed is not None:
        raise CheckpointError(
            f"{name} does not match its checksum (bytes {changed * BLOCK_BYTES:,} to "
            f"{min((changed + 1) * BLOCK_BYTES, expected.bytes):,})"
        )


def checked_spans(files: StepFiles, name: str, expected: FileSum) -> Iterator[Any]:
    """Yield a whole file in checked spans; the next ones load while one is used."""
    starts = range(0, max(expected.bytes, 1), SPAN_BYTES)
    with ThreadPoolExecutor(min(READS_IN_FLIGHT, len(starts))) as pool:
        ahead: deque[Any] = deque()
        for begin in starts:
            end = min(begin + SPAN_BYTES, expected.bytes)
            ahead.append(pool.submit(checked_read, files, name, expected, begin, end))
            if len(ahead) == READS_IN_FLIGHT:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def damage(files: StepFiles, sums: Mapping[str, FileSum]) -> list[str]:
    """Return the problems of these files, one line for each that is missing, truncated or changed."""
    wrong = []
    for name, expected in sums.items():
        try:
            deque(checked_spans(files, name, expected), maxlen=0)
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


class CheckedReader(StorageReader):
    """Reads what DCP plans. With `ranks`, what this rank's files lack comes from a rank that has it. `damaged` lists
    which file of which rank was found changed."""

    def __init__(
        self,
        files: StepFiles,
        metadata: Metadata,
        sums: Mapping[str, FileSum],
        ranks: SavingRanks | None = None,
    ) -> None:
        self._files, self._metadata, self._sums, self._ranks = files, metadata, sums, ranks
        self._me = dist.get_rank(ranks.group) if ranks is not None and ranks.group is not None else 0
        self.damaged: set[tuple[int, str]] = set()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "a reader is made for one step"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = cast("Mapping[Any, Any]", metadata.storage_data)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        filling = Filling(plan.items, self._places, self._sums, planner, shapes_of(self._metadata))
        here = [span for span in filling.spans if self._ranks is None or self._files.size(span.name) is not None]
        errors: list[Exception] = []

        def read_here(span: Span) -> None:
            if errors:
                return  # the step will not be used
            try:
                data = checked_read(self._files, span.name, self._sums[span.name], span.begin, span.end)
                filling.arrived(span, data)
            except Exception as error:  # noqa: BLE001 -- raised below, once the other ranks have what they wait for
                self.damaged.add((self._me, span.name))
                errors.append(error)

        with ThreadPoolExecutor(READS_IN_FLIGHT) as pool:
            list(pool.map(read_here, here))
        if self._ranks is not None and self._ranks.world > 1:  # also after an error: the other ranks depend on this one
            elsewhere = [span for span in filling.spans if self._files.size(span.name) is None]
            try:
                self._exchange(self._ranks, elsewhere, filling)
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise CheckpointError("; ".join(dict.fromkeys(str(error) for error in errors)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _exchange(self, ranks: SavingRanks, spans: Sequence[Span], filling: Filling) -> None:
        """Every rank walks the same list of transfers, so no two wait for each other."""
        wanted: list[Sequence[Span]] = ranks.gather(spans)
        names = {span.name for requests in wanted for span in requests}
        if not names:
            return
        mine = {name for name in names if name in self._sums and self._files.size(name) == self._sums[name].bytes}
        holders = ranks.gather(mine)
        me, served = self._me, [0] * ranks.world
        problems: list[str] = []
        for reader, requests in enumerate(wanted):
            for span in requests:
                owners = [rank for rank, held in enumerate(holders) if span.name in held]
                if not owners:
                    if reader == me:
                        problems.append(f"{span.name} is not on any node")
                    continue
                owner = min(owners, key=lambda rank: served[rank])
                served[owner] += span.end - span.begin
                if me == owner:
                    self._send(ranks, reader, span)
                elif me == reader:
                    data = _receive(ranks, owner, span.end - span.begin)
                    try:
                        if data is None:
                            raise CheckpointError(f"{span.name} cannot be read on the node of rank {owner}")
                        check_blocks(span.name, data, self._sums[span.name], span.begin)
                        filling.arrived(span, data)
                    except CheckpointError as error:
                        self.damaged.add((owner, span.name))
                        problems.append(str(error))
        if problems:
            raise CheckpointError("; ".join(dict.fromkeys(problems)))

    def _send(self, ranks: SavingRanks, reader: int, span: Span) -> None:
        length = span.end - span.begin
        try:
            data = self._files.read(span.name, span.begin, span.end)
        except CheckpointError:
            data = b""
        tensor = torch.zeros(length + 1, dtype=torch.uint8)
        if len(data) == length:
            tensor[:-1] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            tensor[-1] = 1
        dist.send(tensor, group=ranks.group, group_dst=reader)


def _receive(ranks: SavingRanks, owner: int, length: int) -> memoryview | None:
    tensor = torch.empty(length + 1, dtype=torch.uint8)
    dist.recv(tensor, group=ranks.group, group_src=owner)
    return memoryview(tensor.numpy().data)[:-1] if int(tensor[-1]) == 1 else None


class Filling:
    """Tensors being filled from spans, in any order and by any thread."""

    def __init__(
        self,
        items: Sequence[ReadItem],
        places: Mapping[Any, Any],
        sums: Mapping[str, FileSum],
        planner: LoadPlanner,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        self._planner = planner
        self._lock = threading.Lock()
        self._users: dict[Span, list[SavedItem]] = {}
        for item in items:
            if item.type is not LoadItemType.TENSOR:  # DCP would unpickle it
                raise CheckpointError(f"{item.storage_index.fqn} is not a tensor")
            place = places[item.storage_index]
            if place.relative_path not in sums:
                raise CheckpointError(f"{place.relative_path} holds tensors but is not in checksums.json")
            raw = place if isinstance(place, RawPlace) else None
            dtype = shapes[item.storage_index.fqn][1]
            saved = SavedItem(item, place.relative_path, place.offset, place.length, dtype, raw)
            first, last = place.offset // SPAN_BYTES, (place.offset + place.length - 1) // SPAN_BYTES
            size = sums[saved.name].bytes
            saved.spans = tuple(
                Span(saved.name, number * SPAN_BYTES, min((number + 1) * SPAN_BYTES, size))
                for number in range(first, last + 1)
            )
            for span in saved.spans:
                self._users.setdefault(span, []).append(saved)
        self.spans = sorted(self._users)

    def arrived(self, span: Span, data: Any) -> None:
        """Fill the tensors whose last span this is."""
        whole = []
        with self._lock:
            for saved in self._users.pop(span):
                saved.arrived[span] = data
                if len(saved.arrived) == len(saved.spans):
                    whole.append(saved)
        for saved in whole:
            fill(saved, self._planner)
            saved.arrived.clear()


@torch.no_grad()  # per thread: reader threads do not inherit it
def fill(saved: SavedItem, planner: LoadPlanner) -> None:
    """Copy a tensor to where the planner needs it."""
    item = saved.item
    target: Tensor = planner.resolve_tensor(item).detach()
    tensor = _raw_tensor(saved, saved.raw) if saved.raw else _archived_tensor(saved)
    reach = [first + count for first, count in zip(item.storage_offsets, item.lengths, strict=True)]
    if len(reach) != tensor.dim() or any(end > size for end, size in zip(reach, tensor.size(), strict=True)):
        raise CheckpointError(f"{item.storage_index.fqn} is {list(tensor.size())}, smaller than {METADATA} says")
    for dimension, (first, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, first, count)
    if target.size() != tensor.size():
        raise CheckpointError(f"{item.storage_index.fqn} is {list(tensor.size())}, not {list(target.size())}")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _archived_tensor(saved: SavedItem) -> Tensor:
    """Read an archive of torch.save. Older formats are refused: DCP never wrote them."""
    name = saved.item.storage_index.fqn
    try:
        tensor = read_archive(cast("IO[bytes]", _SpansFile(saved)), saved.length)
    except CheckpointError as error:
        raise CheckpointError(f"{saved.name}: {name} cannot be read as a tensor: {error}") from None
    if tensor.dtype is not saved.dtype:
        raise CheckpointError(f"{saved.name}: {name} is not the {saved.dtype} that {METADATA} says")
    return tensor


def _raw_tensor(saved: SavedItem, raw: RawPlace) -> Tensor:
    """Return raw bytes as a tensor; without a copy if one span has them all."""
    if len(saved.spans) == 1:
        start = saved.offset - saved.spans[0].begin
        data = torch.frombuffer(saved.arrived[saved.spans[0]], dtype=torch.uint8)[start : start + saved.length]
    else:
        data = torch.empty(saved.length, dtype=torch.uint8)
        _SpansFile(saved).readinto(data.numpy().data)
    return data.view(raw.dtype).view(raw.sizes)


class _SpansFile(io.RawIOBase):
    """The bytes of one tensor as a file, read from its spans without joining them first."""

    def __init__(self, saved: SavedItem) -> None:
        super().__init__()
        self._views = [memoryview(saved.arrived[span]) for span in saved.spans]
        self._skipped = saved.offset - saved.spans[0].begin
        self._length, self._at = saved.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(target.nbytes, self._length - self._at))]
        count = 0
        while count < target.nbytes:
            number, start = divmod(self._skipped + self._at, SPAN_BYTES)
            part = self._views[number][start : start + target.nbytes - count]
            target[count : count + part.nbytes] = part
            count += part.nbytes
            self._at += part.nbytes
        return count
