"""Append-only files of JSON lines: one writer, any number of readers, at any time.

A reader never sees half a line: text without a newline is left for the next read, and lines that are not JSON objects
are skipped. An existing file that cannot be read raises OSError unless `noting_unread` collects it, and so does
anything but a regular file (`regular_files`). A writer that cannot write (full disk, missing folder) keeps its lines in
bounded memory until it can, and leaves no partial line behind.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from craton.telemetry.files.regular_files import UnsafeFileError, append_regular, note_unread, open_regular

WAITING_BYTES = 8 << 20  # of unwritten lines per file: hours of a node's records
CHUNK_BYTES = 256 << 10  # written in one call
# NaN and infinity are not JSON, but Python writes them: read as null, like our own writers do.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode
# An integer beyond 64 bits is not a measurement, and a float cannot hold it: also null.
_decode_long = json.JSONDecoder(
    parse_constant=lambda name: None, parse_int=lambda digits: int(digits) if len(digits) < MAX_DIGITS else None
).decode
MAX_DIGITS = 19
_LONG_NUMBER = re.compile(rb"\d{%d}" % MAX_DIGITS)
MAX_READ_BYTES = 64 << 20  # per call; the next call continues
MAX_LINE_BYTES = 4 << 20  # agents accept lines of up to 1 MiB; a sparse file of zeros is one endless line


def read_lines(path: Path, offset: int = 0, max_bytes: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines from `offset` (the end of an earlier read) on, and the offset for the next read.

    A file that does not exist yet has no lines. `max_bytes` limits how much is read at once (but never splits a line of
    up to MAX_LINE_BYTES).
    """
    max_bytes = MAX_READ_BYTES if max_bytes is None else max_bytes
    try:
        with open_regular(path) as handle:
            new_bytes = max(0, os.fstat(handle.fileno()).st_size - offset)
            handle.seek(offset)
            if new_bytes <= max_bytes:
                data = handle.read(new_bytes)
            else:
                data = handle.read(max_bytes)
                rest = handle.readline(MAX_LINE_BYTES)
                if len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    raise UnsafeFileError(path, f"has a line of more than {MAX_LINE_BYTES:,} bytes")
                data += rest
    except OSError as error:
        _pass_over(path, error)
        return [], offset
    end = data.rfind(b"\n") + 1
    return parse_lines(data[:end]), offset + end


def tail_lines(path: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the complete lines in the last `max_bytes` of a file, oldest first."""
    try:
        with open_regular(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            # One byte earlier: a line that begins exactly at the border is complete and must be kept.
            start = max(0, size - max_bytes - 1)
            handle.seek(start)
            data = handle.read(size - start)
    except OSError as error:
        _pass_over(path, error)
        return []
    begin = data.find(b"\n") + 1 if size > max_bytes else 0
    return parse_lines(data[begin : data.rfind(b"\n") + 1])


def _pass_over(path: Path, error: OSError) -> None:
    """Ignore a missing file, or note an unreadable one; raise if notes are not collected."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    if not note_unread(path, error):
        raise error


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects among lines of text; anything else is skipped."""
    result = []
    for line in data.split(b"\n"):
        document = parse_line(line)
        if document is not None:
            result.append(document)
    return result


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None."""
    if not line.startswith(b"{"):
        return None
    try:
        decode = _decode_long if _LONG_NUMBER.search(line) else _decode
        document = decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


class LineWriter:
    """Appends lines to one file, in order, and never raises.

    Lines that the disk refuses wait in memory and are written as soon as there is space. Beyond `most_bytes` the oldest
    are dropped: `lost_lines` counts them. `error` says why lines wait; None if none do.
    """

    def __init__(self, path: Path, most_bytes: int = WAITING_BYTES) -> None:
        self.path = path
        self.lost_lines = 0
        self.error: OSError | None = None
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()  # each with its newline
        self._waiting_bytes = 0
        self._descriptor: int | None = None

    @property
    def waiting_lines(self) -> int:
        return len(self._waiting)

    def append(self, lines: Sequence[bytes]) -> bool:
        """Append lines (each without its newline); False while some wait for disk space."""
        for line in lines:
            self._waiting.append(line + b"\n")
            self._waiting_bytes += len(line) + 1
        return self.flush()

    def flush(self) -> bool:
        """Write waiting lines; False if the disk refuses some."""
        try:
            while self._waiting:
                self._write_some()
        except OSError as error:
            self.error = error
            self._drop_oldest()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.close()  # it may be another file when the storage is back
            return False
        self.error = None
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # late error of a network file system: the lines are lost
                os.close(self._descriptor)
            self._descriptor = None

    def _write_some(self) -> None:
        """Write the oldest lines in one call. If the disk fills up, only complete lines stay in the file."""
        if self._descriptor is None:
            self._descriptor = self._open()
        chunk: list[bytes] = []
        size = 0
        for line in self._waiting:
            if chunk and size + len(line) > CHUNK_BYTES:
                break
            chunk.append(line)
            size += len(line)
        before = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, b"".join(chunk))
        whole = 0
        while chunk and whole + len(chunk[0]) <= written:
            whole += len(chunk.pop(0))
            self._waiting.popleft()
        self._waiting_bytes -= whole
        if whole < written:  # otherwise the next line would be appended to a partial one
            os.ftruncate(self._descriptor, before + whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _drop_oldest(self) -> None:
        while self._waiting_bytes > self._most_bytes:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.lost_lines += 1

    def _open(self) -> int:
        descriptor = append_regular(self.path, os.O_RDWR)
        size = os.fstat(descriptor).st_size
        try:
            # An earlier writer may have been killed in the middle of a line.
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
