"""Checksums of files, known from the bytes as they are written: of the whole file and of each block of 8 MiB, so that
whoever needs a part of a file reads and checks that part only.

A step is sealed by two small files: `checksums.json` names every file with its sums, and COMPLETE says what the step is
and carries the sums of both, so that a changed bit in any of them is found as well.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from craton.errors import CratonError
from craton.ml.training.checkpoint.about import check_about

COMPLETE = "COMPLETE"
CHECKSUMS = "checksums.json"
METADATA = ".metadata"  # DCP's: which tensor lies where
MAX_SEAL_BYTES = {COMPLETE: 2**24, CHECKSUMS: 2**28}  # of a step of 100 TB, checksums.json has a tenth of that
BLOCK_BYTES = 8 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_POLYNOMIAL = 0xEDB88320  # of crc32, bits reversed as zlib has it


class CheckpointError(CratonError):
    """A checkpoint could not be written or read."""


class RanksLostError(RuntimeError):
    """Ranks could not talk to each other while one waited for a save: not the job's fault, nor the checkpoint's."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"gloo: {problem}")  # as torch begins what it says of a lost connection


class DifferentModelError(CheckpointError):
    """A checkpoint is whole, but belongs to another model or another optimizer."""


@dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    crc32: int
    bytes: int
    blocks: tuple[int, ...]  # crc32 of each BLOCK_BYTES, the last one shorter


class RunningSum:
    """The sums of what went by so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._blocks: list[int] = []
        self._open = 0  # crc32 of the block that is not full yet

    def update(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            part = view[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._open = zlib.crc32(part, self._open)
            self.bytes += part.nbytes
            if self.bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._open)
                self._open = 0
            view = view[part.nbytes :]

    def result(self) -> FileSum:
        rest = self.bytes % BLOCK_BYTES
        blocks = [*self._blocks, self._open] if rest or not self._blocks else self._blocks
        whole = blocks[0]
        for index, block in enumerate(blocks[1:], 1):
            length = rest if rest and index == len(blocks) - 1 else BLOCK_BYTES
            whole = combine(whole, block, length)
        return FileSum(whole, self.bytes, tuple(blocks))


@dataclass(frozen=True)
class Seal:
    """What a finished step says of itself: `about` (step, counters, ...) and its files."""

    about: dict[str, Any]
    files: dict[str, FileSum]

    @property
    def save(self) -> str:
        """Which save made it; the parts of one step on several nodes belong together when this is the same."""
        return str(self.about["save"])

    def texts(self) -> dict[str, bytes]:
        """The two small files, COMPLETE last."""
        table = {name: asdict(file) for name, file in sorted(self.files.items())}
        checksums = json.dumps({"block_bytes": BLOCK_BYTES, "files": table}, indent=1).encode()
        about = {**self.about, "checksums": zlib.crc32(checksums)}
        return {CHECKSUMS: checksums, COMPLETE: json.dumps({**about, "crc32": _sum_of(about)}, indent=1).encode()}

    @classmethod
    def parse(cls, texts: Mapping[str, bytes], step: int) -> Seal:
        """Of this step, from the contents of the two files; CheckpointError when one is missing or not right."""
        for name in (COMPLETE, CHECKSUMS):
            if name not in texts:
                raise CheckpointError(f"{name} is missing, so it was never finished")
        name = COMPLETE
        try:
            about = _object(texts[COMPLETE])
            if about.pop("crc32") != _sum_of(about):
                raise ValueError("it has another checksum than when it was written")
            name = CHECKSUMS
            if about.pop("checksums") != zlib.crc32(texts[CHECKSUMS]):
                raise ValueError("it has another checksum than when it was written")
            table = _object(texts[CHECKSUMS])
            if table["block_bytes"] != BLOCK_BYTES:
                raise ValueError(f"its blocks have {ascii(table['block_bytes'])[:20]} bytes instead of {BLOCK_BYTES}")
            files = {item: _file_sum(item, file) for item, file in table["files"].items()}
            name = COMPLETE
            check_about(about, step)
        except KeyError as error:
            raise CheckpointError(f"{name} cannot be used: {error} is missing") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name} cannot be used: {error}") from error
        return cls(about, files)


def _object(text: bytes) -> dict[str, Any]:
    document = json.loads(text)
    if type(document) is not dict:
        raise ValueError("it is not a JSON object")
    return document


def _file_sum(name: str, entry: Any) -> FileSum:
    """A line of checksums.json. Its name becomes a path, so it must be the name of a file beside it."""
    if not _FILE_NAME.fullmatch(name) or name in (".", "..", COMPLETE, CHECKSUMS):
        raise ValueError(f"{ascii(name)[:80]} is not the name of a file of a step")
    file_sum = FileSum(entry["crc32"], entry["bytes"], tuple(entry["blocks"]))
    if any(type(number) is not int or number < 0 for number in (file_sum.crc32, file_sum.bytes, *file_sum.blocks)):
        raise ValueError(f"{name} has a size or checksum that is not a whole number")
    if len(file_sum.blocks) != max(1, -(-file_sum.bytes // BLOCK_BYTES)):
        raise ValueError(f"{name} has {file_sum.bytes:,} bytes and {len(file_sum.blocks):,} checksums of blocks")
    return file_sum


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of two pieces one after the other, from the crc32 of each."""
    return _apply(_appended_zeros(second_bytes), first) ^ second


def changed_block(data: Any, expected: FileSum, first_block: int) -> int | None:
    """Which block of a piece of a file, that begins with a block, is not what was written; None: all are."""
    view = memoryview(data)
    for index in range(-(-view.nbytes // BLOCK_BYTES)):
        block = view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        if zlib.crc32(block) != expected.blocks[first_block + index]:
            return first_block + index
    return None


@lru_cache(maxsize=256)
def _appended_zeros(num_bytes: int) -> tuple[int, ...]:
    """What zero bytes behind a text do to its crc32: a matrix over bits, one column an integer."""
    doubled: Sequence[int] = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        doubled = [_apply(doubled, column) for column in doubled]
    result: Sequence[int] = [1 << bit for bit in range(32)]
    while num_bytes:
        if num_bytes & 1:
            result = [_apply(doubled, column) for column in result]
        doubled = [_apply(doubled, column) for column in doubled]
        num_bytes >>= 1
    return tuple(result)


def _apply(matrix: Sequence[int], vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _sum_of(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())
