"""Checksums of files, computed from the bytes as they are written: of the whole file and of each block of 8 MiB, so
that a reader of part of a file reads and checks only that part.

Two small files seal a step: `checksums.json` lists every file with its sums; COMPLETE describes the step and carries
the sums of both, so a changed bit in either of them is found as well.
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
METADATA = ".metadata"  # DCP's: which tensor is where
MAX_SEAL_BYTES = {COMPLETE: 2**24, CHECKSUMS: 2**28}  # for a step of 100 TB, checksums.json has a tenth of that
BLOCK_BYTES = 8 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_POLYNOMIAL = 0xEDB88320  # of crc32, bits reversed as in zlib


class CheckpointError(CratonError):
    """A checkpoint could not be written or read."""


class RanksLostError(RuntimeError):
    """Ranks lost contact while one waited for a save: neither the job nor the checkpoint is at fault."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"gloo: {problem}")  # the prefix of torch's own messages about a lost connection


class DifferentModelError(CheckpointError):
    """A checkpoint is complete, but belongs to another model or optimizer."""


@dataclass(frozen=True)
class FileSum:
    """Expected size and checksums of a file."""

    crc32: int
    bytes: int
    blocks: tuple[int, ...]  # crc32 of each BLOCK_BYTES, the last one shorter


class RunningSum:
    """The checksums of the bytes so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._blocks: list[int] = []
        self._open = 0  # crc32 of the incomplete block

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
    """The seal of a finished step: `about` (step, counters, ...) and its files."""

    about: dict[str, Any]
    files: dict[str, FileSum]

    @property
    def save(self) -> str:
        """Id of the save; parts of one step on several nodes belong together if it is the same."""
        return str(self.about["save"])

    def texts(self) -> dict[str, bytes]:
        """The two small files, COMPLETE last."""
        table = {name: asdict(file) for name, file in sorted(self.files.items())}
        checksums = json.dumps({"block_bytes": BLOCK_BYTES, "files": table}, indent=1).encode()
        about = {**self.about, "checksums": zlib.crc32(checksums)}
        return {CHECKSUMS: checksums, COMPLETE: json.dumps({**about, "crc32": _sum_of(about)}, indent=1).encode()}

    @classmethod
    def parse(cls, texts: Mapping[str, bytes], step: int) -> Seal:
        """Parse the contents of the two files of this step; CheckpointError if one is missing or invalid."""
        for name in (COMPLETE, CHECKSUMS):
            if name not in texts:
                raise CheckpointError(f"{name} is missing, so the step was never finished")
        name = COMPLETE
        try:
            about = _object(texts[COMPLETE])
            if about.pop("crc32") != _sum_of(about):
                raise ValueError("it does not match its checksum")
            name = CHECKSUMS
            if about.pop("checksums") != zlib.crc32(texts[CHECKSUMS]):
                raise ValueError("it does not match its checksum")
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
    """Parse an entry of checksums.json. Its name becomes a path, so it must be a plain file name."""
    if not _FILE_NAME.fullmatch(name) or name in (".", "..", COMPLETE, CHECKSUMS):
        raise ValueError(f"{ascii(name)[:80]} is not a valid file name of a step")
    file_sum = FileSum(entry["crc32"], entry["bytes"], tuple(entry["blocks"]))
    if any(type(number) is not int or number < 0 for number in (file_sum.crc32, file_sum.bytes, *file_sum.blocks)):
        raise ValueError(f"{name} has a size or checksum that is not a whole number")
    if len(file_sum.blocks) != max(1, -(-file_sum.bytes // BLOCK_BYTES)):
        raise ValueError(f"{name} has {file_sum.bytes:,} bytes but {len(file_sum.blocks):,} block checksums")
    return file_sum


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32 of two concatenated pieces from the crc32 of each."""
    return _apply(_appended_zeros(second_bytes), first) ^ second


def changed_block(data: Any, expected: FileSum, first_block: int) -> int | None:
    """Return which block of a piece of a file (the piece starts at a block) has changed; None: none has."""
    view = memoryview(data)
    for index in range(-(-view.nbytes // BLOCK_BYTES)):
        block = view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        if zlib.crc32(block) != expected.blocks[first_block + index]:
            return first_block + index
    return None


@lru_cache(maxsize=256)
def _appended_zeros(num_bytes: int) -> tuple[int, ...]:
    """Return how appended zero bytes change a crc32: a matrix over bits, one integer per column."""
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
