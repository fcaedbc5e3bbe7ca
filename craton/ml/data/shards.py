"""Token shards on disk: the folder format, and reading it as one long stream.

FOLDER/index.json         what is there (below), written last
FOLDER/shard-00000.tokens     token ids, uint16 or uint32, documents one after another
FOLDER/shard-00000.documents  uint64, where each document of the shard ends
FOLDER/shard-00000.loss       uint8, the loss mask: 1 where a token is learnt (chat and pair only)
FOLDER/tokenizer.json …       the tokenizer that made them

Of kind pair, document 2k is the chosen and 2k + 1 the rejected sequence of a pair, each with its prompt.

A folder that opens has files of exactly the sizes in its index and a format that this version reads. Token ids are
checked whenever they are read. Files are memory-mapped: opening a terabyte takes no memory. If the folder mirrors one
in an object store, each file is fetched on first read, and its checksum is verified then.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from craton.errors import CratonError
from craton.ml.data.errors import DataError
from craton.ml.data.sample import Integers

if TYPE_CHECKING:
    from craton.infrastructure.storage import CachedFolder

FORMAT = 1
INDEX = "index.json"
SHARD_SUFFIXES = (".tokens", ".documents", ".loss")
_CHUNK_BYTES = 1 << 24

ShardKind = Literal["text", "chat", "pair"]
KINDS_WITH_LOSS = ("chat", "pair")


@dataclass(frozen=True)
class Shard:
    """One shard: its contents, and the checksum of each of its files."""

    name: str
    tokens: int
    documents: int
    bytes: dict[str, int]  # suffix -> size
    crc32: dict[str, int]  # suffix -> checksum


@dataclass(frozen=True)
class TokenizerMark:
    """Which tokenizer made the ids."""

    name: str
    vocab_size: int
    fingerprint: str  # of its behaviour: the vocabulary, and how it splits a fixed text
    file_sha256: str  # of tokenizer.json, to recognise an identical file quickly


@dataclass(frozen=True)
class Index:
    """index.json."""

    kind: ShardKind
    dtype: str
    max_id: int
    tokenizer: TokenizerMark
    shards: tuple[Shard, ...]
    format: int = FORMAT

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "tokens": self.tokens, "documents": self.documents}, indent=1) + "\n"


def is_shard_folder(path: Path) -> bool:
    """Whether a folder claims to be token shards, complete or not."""
    return (path / INDEX).is_file() and b'"shards"' in (path / INDEX).read_bytes()


class Shards:
    """A folder of token shards as one stream of tokens with document ends."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.index = _read_index(self.folder)
        self._cached = _behind(self.folder)
        self._suffixes = SHARD_SUFFIXES if self.index.kind in KINDS_WITH_LOSS else SHARD_SUFFIXES[:2]
        for shard in self.index.shards:
            self._check_sizes(shard)
        self._starts = list(accumulate((shard.tokens for shard in self.index.shards), initial=0))
        self._maps: dict[tuple[int, str], NDArray] = {}

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    @property
    def mark(self) -> NDArray[np.uint64]:
        """The checksums of all files: other tokens have another mark."""
        return np.array([crc for shard in self.index.shards for crc in shard.crc32.values()], np.uint64)

    def check_vocabulary(self, vocab: int, model: str = "the model") -> None:
        """Check that the model's vocabulary covers every id of the tokenizer that made these shards."""
        mark = self.index.tokenizer
        largest = max(self.index.max_id + 1, mark.vocab_size)
        if largest > vocab:
            raise DataError(
                f"{self.folder}: made with tokenizer {mark.name} of {mark.vocab_size:,} ids (largest used: "
                f"{self.index.max_id:,}), but {model} has a vocabulary of {vocab:,}; tokenize with the model's own "
                f"tokenizer, or give the model `vocab: {_round_up(largest)}`"
            )

    def read(self, start: int, stop: int, vocab: int | None = None) -> Integers:
        """Return tokens [start, stop) of the stream. An id outside the vocabulary is an error with its position."""
        limit = vocab or self.index.tokenizer.vocab_size
        parts: list[Integers] = []
        for number, begin, end in self._pieces(start, stop):
            part = np.asarray(self._map(number, ".tokens")[begin:end])
            if int(part.max()) >= limit:
                raise self._outside(number, begin, part, limit)
            parts.append(part.astype(np.int64))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def boundaries(self, start: int, stop: int) -> Integers:
        """Return where documents begin inside [start, stop), relative to `start`, which itself is not included."""
        parts = []
        for number, _, _ in self._pieces(start, stop):
            ends, offset = self._map(number, ".documents"), self._starts[number]
            first = int(np.searchsorted(ends, np.uint64(max(start - offset, 0)), "right"))
            last = int(np.searchsorted(ends, np.uint64(stop - offset), "left"))
            parts.append(np.asarray(ends[first:last]).astype(np.int64) + (offset - start))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_ends(self) -> Integers:
        """Return where every document ends in the stream; takes 8 bytes of memory per document."""
        shards = range(len(self.index.shards))
        parts = [self._map(number, ".documents").astype(np.int64) + self._starts[number] for number in shards]
        return np.concatenate(parts)

    def learnt(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return the loss mask of tokens [start, stop) (of kinds with one)."""
        parts = [np.asarray(self._map(number, ".loss")[a:b]) for number, a, b in self._pieces(start, stop)]
        return np.concatenate(parts).astype(bool)

    def verify(self) -> None:
        """Read every file and verify its checksum."""
        for number in range(len(self.index.shards)):
            self._verify_shard(number)

    def _verify_shard(self, number: int) -> None:
        shard = self.index.shards[number]
        for suffix in self._suffixes:
            path = self.folder / f"{shard.name}{suffix}"
            with self._open(shard, suffix) as file:
                damaged = _crc32(file) != shard.crc32[suffix]
            if damaged:
                raise DataError(
                    f"{path}: its checksum differs from {INDEX}: it was changed or damaged after it was "
                    "written; copy it again from the source, or tokenize again"
                )

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, begin, end) inside each shard that [start, stop) touches."""
        assert 0 <= start < stop <= self.tokens, f"[{start}, {stop}) of {self.tokens} tokens"
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = self._starts[number]
            end = min(stop, self._starts[number + 1])
            yield number, start - offset, end - offset
            start, number = end, number + 1

    def _map(self, number: int, suffix: str) -> NDArray:
        result = self._maps.get((number, suffix))
        if result is not None:
            return result
        shard = self.index.shards[number]
        path = self.folder / f"{shard.name}{suffix}"
        dtype = {".tokens": self.index.dtype, ".documents": "uint64", ".loss": "uint8"}[suffix]
        try:
            with self._open(shard, suffix) as file:
                # A plain view: indexing an np.memmap costs several times as much as indexing an array.
                mapped = np.asarray(np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r"))
        except CratonError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be memory-mapped: {error}; tokenize again") from None
        if suffix == ".documents" and int(mapped[-1]) != shard.tokens:
            raise DataError(
                f"{path}: the last document ends at token {int(mapped[-1]):,}, but the shard has {shard.tokens:,}; "
                "the files do not belong together: copy the folder again, or tokenize again"
            )
        self._maps[number, suffix] = mapped
        return mapped

    def _check_sizes(self, shard: Shard) -> None:
        for suffix in self._suffixes:
            path = self.folder / f"{shard.name}{suffix}"
            expected = shard.bytes[suffix]
            size = self._size(shard, suffix)
            if size is None:
                raise DataError(f"{path}: is missing, but listed in {INDEX}; copy the whole folder, or tokenize again")
            if size != expected:
                problem = "is empty" if size == 0 else "is truncated" if size < expected else "is too long"
                raise DataError(
                    f"{path}: {problem}: {size:,} bytes, but {INDEX} says {expected:,}; copy it again from the "
                    "source, or tokenize again"
                )

    def _open(self, shard: Shard, suffix: str) -> BinaryIO:
        name = f"{shard.name}{suffix}"
        if self._cached is None:
            return (self.folder / name).open("rb")
        cached, inside = self._cached
        return cached.open(inside + name, shard.crc32[suffix])

    def _size(self, shard: Shard, suffix: str) -> int | None:
        """Return the file size; None if the file does not exist."""
        name = f"{shard.name}{suffix}"
        if self._cached is not None:
            cached, inside = self._cached
            info = cached.listing.get(inside + name)
            return info.bytes if info else None
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def _outside(self, number: int, begin: int, part: NDArray, limit: int) -> DataError:
        """Return an error that gives the bad id, its position and the limit."""
        self._verify_shard(number)
        position = begin + int(np.argmax(part >= limit))
        return DataError(
            f"{self.folder / self.index.shards[number].name}.tokens: position {position:,} holds token id "
            f"{int(part[position - begin]):,}, outside the vocabulary of {limit:,}; tokenize with the model's own "
            "tokenizer, or give the model a larger `vocab`"
        )


def _crc32(file: BinaryIO) -> int:
    crc = 0
    while chunk := file.read(_CHUNK_BYTES):
        crc = zlib.crc32(chunk, crc)
    return crc


def _behind(folder: Path) -> tuple[CachedFolder, str] | None:
    """Return the object-store cache that contains a folder, if any."""
    from craton.infrastructure.storage import CachedFolder

    return CachedFolder.of(folder)


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        document: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        partial = " (left by an unfinished `craton data tokenize`)" if folder.name.endswith(".partial") else ""
        raise DataError(
            f"{folder}: is not a folder of token shards: it has no {INDEX}{partial}; create one with "
            f"`craton data tokenize TEXT --to {folder.name.removesuffix('.partial') or 'FOLDER'}`"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; copy the folder again, or tokenize again") from None
    version = document.get("format")
    if version != FORMAT:
        raise DataError(f"{path}: format {version!r} is not supported (this Craton reads {FORMAT}); tokenize again")
    try:
        index = Index(
            kind=document["kind"],
            dtype=document["dtype"],
            max_id=int(document["max_id"]),
            tokenizer=TokenizerMark(**document["tokenizer"]),
            shards=tuple(Shard(**shard) for shard in document["shards"]),
        )
        is_known = index.kind in ("text", *KINDS_WITH_LOSS) and index.dtype in ("uint16", "uint32")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {error!r} is missing or wrong; copy the folder again, or tokenize again") from None
    if not is_known or not index.tokens:
        raise DataError(f"{path}: has an unknown kind of tokens; tokenize again")
    return index


def _round_up(count: int) -> int:
    """Round up to a vocabulary that divides well among ranks and matrix tiles."""
    return -(-count // 128) * 128
