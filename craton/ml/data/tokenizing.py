"""Tokenize text into shards in parallel, with the same result for any number of workers.

The parent reads the input in pieces, distributes them in order, collects the results in order and is the only writer.
Workers are spawned, ignore Ctrl-C and exit when the parent does.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from craton.formatting import amount, counted, percent
from craton.ml.data.chat import ChatEncoder, ensure_template
from craton.ml.data.documents import DocumentChunk, InputFile, find_files, pieces_of, records, tasks_of, texts_of
from craton.ml.data.encoding import Encoded, TextEncoder
from craton.ml.data.errors import DataError
from craton.ml.data.order import key_of
from craton.ml.data.pair_rows import PairEncoder, has_messages
from craton.ml.data.shards import INDEX, ShardKind
from craton.ml.data.tokenizer import copy_tokenizer, find_tokenizer, mark_of, train_bpe
from craton.ml.data.writer import SHARD_TOKENS, ShardWriter, new_folder
from craton.remote import is_url

VALIDATION = "validation"  # the held-out documents: a folder of shards inside the folder of shards
BPE_TRAINING_BYTES_PER_ID = 2048  # of text; more hardly changes the merges, and training time grows with the text
MAX_DROPPED_SHARE = 0.05  # of rows of pairs that cannot be used

Progress = Callable[[int, int, str], None]  # bytes done, bytes in total, current action
Encoder = Callable[[Sequence[DocumentChunk]], Encoded]

logger = logging.getLogger("craton.data")


@dataclass(frozen=True)
class Tokenized:
    """Result of a tokenization."""

    folder: Path | str  # or a URL
    documents: int
    tokens: int
    validation_documents: int
    validation_tokens: int
    text_bytes: int
    vocab_size: int
    seconds: float  # total
    tokenizing_seconds: float  # without finding the input and training a tokenizer
    left_out: tuple[str, ...] = ()  # skipped files that are not UTF-8
    dropped: int = 0  # skipped rows of pairs
    first_dropped: str = ""  # the first of them: `file:line: why`

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / (self.tokens + self.validation_tokens)

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens + self.validation_tokens) / self.tokenizing_seconds


def tokenize(
    inputs: Sequence[str | Path],
    to: Path | str,
    tokenizer: str | Path | None = None,
    bpe_vocabulary: int | None = None,
    field: str = "text",
    workers: int | None = None,
    validation: float = 0.0,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
    kind: ShardKind = "text",
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Tokenized:
    """Write `to`, a folder of shards made from the inputs, with a tokenizer or with a BPE trained on them. At an s3://
    URL the folder appears only when it is complete: index.json is written last. `columns` names fields of pairs."""
    if (tokenizer is None) == (bpe_vocabulary is None):
        raise DataError("give either a tokenizer (folder or Hub id) or --train-bpe 4096 to train one")
    if not 0 <= validation <= 0.5:
        raise DataError(f"validation {validation} is not a valid fraction of documents to hold out; allowed: 0 to 0.5")
    started = time.monotonic()
    files = find_files(inputs)
    report = _Report(sum(file.size for file in files), progress)
    if is_url(to):
        _make_ready(str(to))
    with new_folder(_outgoing(str(to)) if is_url(to) else Path(to)) as folder:
        if bpe_vocabulary is not None:
            report.say("training the tokenizer")
            train_bpe(_sampled_texts(files, field, bpe_vocabulary), bpe_vocabulary, folder)
            name = f"bpe:{bpe_vocabulary}"
        else:
            source = find_tokenizer(str(tokenizer))
            copy_tokenizer(source, folder)
            name = str(tokenizer)
        mark = mark_of(folder, name)
        tokenizing = time.monotonic()
        if kind == "chat" or (kind == "pair" and _first_has_messages(files, columns)):
            ensure_template(folder)
        train = ShardWriter(folder, mark, kind, shard_tokens)
        held_out = ShardWriter(folder / VALIDATION, mark, kind, shard_tokens) if validation else None
        text_bytes = 0
        left_out: list[str] = []
        dropped, first_dropped = 0, ""
        split = _Split(train, held_out, validation, kind)
        make = _encoder_maker(kind, folder, field, columns)
        pieces = pieces_of(files, field if kind == "text" else "")
        for encoded, took in _encode_all(tasks_of(pieces), make, workers or usable_cores(), files):
            split.append(encoded)
            text_bytes += encoded.text_bytes
            left_out += encoded.left_out
            dropped += len(encoded.dropped)
            first_dropped = first_dropped or next(iter(encoded.dropped), "")
            report.add(took, len(encoded.tokens))
        if dropped:
            _check_dropped(dropped, (train.documents + (held_out.documents if held_out else 0)) // 2, first_dropped)
        if not train.tokens:
            if left_out:
                raise DataError(f"{left_out[0]}: is not UTF-8, and no other file has text; convert it, e.g. with iconv")
            raise DataError(f"{', '.join(map(str, inputs))}: gave no tokens to train on; use more text")
        train.close()
        if held_out is not None:
            _close_held_out(held_out, folder)
    if is_url(to):
        report.say("copying")
        _send(str(to))
    return Tokenized(
        to if is_url(to) else Path(to),
        train.documents,
        train.tokens,
        held_out.documents if held_out else 0,
        held_out.tokens if held_out else 0,
        text_bytes,
        mark.vocab_size,
        time.monotonic() - started,
        time.monotonic() - tokenizing,
        tuple(left_out),
        dropped,
        first_dropped,
    )


def train_tokenizer(
    inputs: Sequence[str | Path], vocabulary: int, to: Path, field: str = "text", progress: Progress | None = None
) -> None:
    """Train a byte-level BPE on the inputs and return its folder."""
    files = find_files(inputs)
    _Report(sum(file.size for file in files), progress).say("training the tokenizer")
    with new_folder(to) as folder:
        train_bpe(_sampled_texts(files, field, vocabulary), vocabulary, folder)


def _outgoing(url: str) -> Path:
    """Return the local folder for shards that go to a URL."""
    from craton.infrastructure.storage import cache_root

    return cache_root() / "outgoing" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _make_ready(url: str) -> None:
    """Check before hours of work that the place is free and writable."""
    from craton.infrastructure.storage import open_store

    store = open_store(url)
    store.check_writable()
    if store.exists(INDEX):
        raise DataError(f"{url}: already exists; remove it, or choose another folder")
    shutil.rmtree(_outgoing(url), ignore_errors=True)  # from an earlier attempt


def _send(url: str) -> None:
    from craton.infrastructure import StorageError
    from craton.infrastructure.storage import copy_down

    folder = _outgoing(url)
    try:
        copy_down(folder, url, seal=INDEX)
    except StorageError as error:
        raise DataError(f"{error}; the shards are complete in {folder}: copy them from there") from error
    shutil.rmtree(folder)


def _first_has_messages(files: Sequence[InputFile], columns: Mapping[str, str]) -> bool:
    pieces = (piece for piece in pieces_of(files) if piece.kind != "text")
    return any(has_messages(row, columns) for piece in islice(pieces, 1) for _, row in islice(records(piece), 1))


def _check_dropped(dropped: int, kept: int, first: str) -> None:
    """Refuse data of which many rows cannot be used: more likely a mistake than a few bad rows."""
    total = kept + dropped
    if dropped > MAX_DROPPED_SHARE * total:
        whole = "all" if not kept else f"{dropped:,} of"
        raise DataError(
            f"{first} ({whole} {counted(total, 'row')} cannot be used; up to {percent(MAX_DROPPED_SHARE)} are left out)"
        )


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Split:
    """Splits documents into training and validation by a hash of their first tokens. A text that occurs twice is on one
    side only, and on the same side whatever else is tokenized with it."""

    def __init__(self, train: ShardWriter, held_out: ShardWriter | None, share: float, kind: ShardKind) -> None:
        self._train, self._held_out, self._share = train, held_out, share
        self._is_pair = kind == "pair"  # two documents that stay together, on the side of their prompt
        self._open: ShardWriter | None = None  # of a document that continues in the next task

    def append(self, encoded: Encoded) -> None:
        if self._held_out is None:
            self._train.append(encoded.tokens, encoded.ends, encoded.loss)
            return
        stops = encoded.ends.tolist()
        if not stops or stops[-1] < len(encoded.tokens):
            stops.append(len(encoded.tokens))
        heaps: dict[int, list[tuple[int, int, bool]]] = {0: [], 1: []}
        start = 0
        writer = self._train
        for number, stop in enumerate(stops):
            if not self._is_pair:
                writer = self._open or self._side(encoded.tokens[start:stop])
            elif number % 2 == 0:
                assert encoded.loss is not None
                writer = self._side(encoded.tokens[start : start + int(np.argmax(encoded.loss[start:stop]))])
            ended = number < len(encoded.ends)
            heaps[int(writer is self._held_out)].append((start, stop, ended))
            self._open = None if ended else writer
            start = stop
        for writer, heap in zip((self._train, self._held_out), heaps.values(), strict=True):
            _append_parts(writer, encoded, heap)

    def _side(self, tokens: NDArray[np.uint32]) -> ShardWriter:
        assert self._held_out is not None
        chance = key_of(zlib.crc32(tokens[:4096].tobytes())) / 2**64
        return self._held_out if chance < self._share else self._train


def _append_parts(writer: ShardWriter, encoded: Encoded, parts: list[tuple[int, int, bool]]) -> None:
    if not parts:
        return
    tokens = np.concatenate([encoded.tokens[start:stop] for start, stop, _ in parts])
    places = np.cumsum([stop - start for start, stop, _ in parts])
    ends = places[[ended for _, _, ended in parts]]
    loss = None if encoded.loss is None else np.concatenate([encoded.loss[start:stop] for start, stop, _ in parts])
    writer.append(tokens, ends, loss)


def _close_held_out(held_out: ShardWriter, folder: Path) -> None:
    if held_out.tokens:
        copy_tokenizer(folder, held_out.folder)
        held_out.close()
    else:
        held_out.folder.rmdir()
        logger.warning("too few documents to hold out any for validation")


class _Report:
    """Reports progress in bytes of the input, with the rate in tokens."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = self._tokens = 0
        self._started = time.monotonic()

    def say(self, label: str) -> None:
        if self._progress:
            self._progress(self._done, self._total, label)
        self._started = time.monotonic()

    def add(self, done: int, tokens: int) -> None:
        self._done += done
        self._tokens += tokens
        if self._progress:
            rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
            self._progress(self._done, self._total, f"{amount(self._tokens)} tokens, {amount(rate)}/s")


def _sampled_texts(files: Sequence[InputFile], field: str, vocabulary: int) -> Iterator[str]:
    """Yield as much text as a vocabulary of this size needs, sampled evenly and reproducibly from the input."""
    total = sum(file.size for file in files)
    every = max(1, -(-total // (vocabulary * BPE_TRAINING_BYTES_PER_ID)))
    for number, piece in enumerate(pieces_of(files, field)):
        if number % every == 0:
            yield from texts_of(piece, field)


def _encoder_maker(kind: ShardKind, folder: Path, field: str, columns: Mapping[str, str]) -> Callable[[], Encoder]:
    if kind == "chat":
        return partial(ChatEncoder, folder)
    if kind == "pair":
        return partial(PairEncoder, folder, dict(columns))
    return partial(TextEncoder, folder, field)


def _encode_all(
    tasks: Iterable[list[DocumentChunk]], make: Callable[[], Encoder], workers: int, files: Sequence[InputFile]
) -> Iterator[tuple[Encoded, int]]:
    """Yield (result, bytes of input) of each task, in order."""
    if workers == 1 or sum(file.size for file in files) < 1 << 20:
        encoder = make()
        for task in tasks:
            yield encoder(task), _bytes(task)
        return
    # Spawned, not forked: the parent may hold threads of tokenizers, torch or a progress bar.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(make,))
    waiting: deque[tuple[Future[Encoded], int]] = deque()
    try:
        for task in tasks:
            waiting.append((pool.submit(_work, task), _bytes(task)))
            if len(waiting) > 3 * workers:
                future, took = waiting.popleft()
                yield future.result(), took
        while waiting:
            future, took = waiting.popleft()
            yield future.result(), took
    except BrokenProcessPool:
        raise DataError("a tokenizer worker died, most likely out of memory; retry with fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _bytes(task: list[DocumentChunk]) -> int:
    return sum(piece.took for piece in task)


_encoder: Encoder | None = None


def _begin_worker(make: Callable[[], Encoder]) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = make()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(task: list[DocumentChunk]) -> Encoded:
    assert _encoder is not None
    return _encoder(task)
