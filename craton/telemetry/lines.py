"""Append-only files of JSON lines: one writer, any number of readers, at any time.

A reader never sees half a line: what has no newline yet is left for the next read, and what is not a JSON object is
skipped. A file that is there and cannot be read is an OSError, unless `noting_unread` is asked to go on without it; so
is anything but a regular file (`regular_files`). A writer that cannot write (full disk, vanished folder) counts what it
lost and leaves no half line behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from craton.telemetry.regular_files import UnsafeFileError, note_unread, open_regular

# NaN and infinity are not JSON, but Python's own writer lets them through: read as null, like those we write.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode
MAX_READ_BYTES = 64 << 20  # of one call; the rest of a longer file is read by the next
MAX_LINE_BYTES = 4 << 20  # an agent takes lines of up to 1 MiB; a sparse file of zeros is one endless line


def read_lines(path: Path, offset: int = 0, max_bytes: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """The whole lines that begin at or after `offset` (the end of an earlier read), and the offset to go on from.

    A file that does not exist yet has no lines. `max_bytes` bounds how much is read at once (but never cuts a line of
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
    """The whole lines among the last `max_bytes` of a file, oldest first."""
    try:
        with open_regular(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            # One byte earlier: a line that begins exactly at the border is whole and must not be thrown away.
            start = max(0, size - max_bytes - 1)
            handle.seek(start)
            data = handle.read(size - start)
    except OSError as error:
        _pass_over(path, error)
        return []
    begin = data.find(b"\n") + 1 if size > max_bytes else 0
    return parse_lines(data[begin : data.rfind(b"\n") + 1])


def _pass_over(path: Path, error: OSError) -> None:
    """Goes on without a file that is not there, or that may be noted instead."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    if not note_unread(path, error):
        raise error


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects among lines of text; anything else is skipped."""
    found = []
    for line in data.split(b"\n"):
        document = parse_line(line)
        if document is not None:
            found.append(document)
    return found


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object a line holds, or None."""
    if not line.startswith(b"{"):
        return None
    try:
        document = _decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


class LineWriter:
    """Appends lines to one file; never raises, `lost_lines` counts what could not be written and `error` says why."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost_lines = 0
        self.error: OSError | None = None
        self._descriptor: int | None = None

    def append(self, lines: Sequence[bytes]) -> bool:
        """Writes lines (each without its newline) in one call; False when they are lost."""
        if not lines:
            return True
        try:
            self._write(b"\n".join(lines) + b"\n")
        except OSError as error:
            self.error = error
            self.lost_lines += len(lines)
            return False
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        before = os.fstat(self._descriptor).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            # A disk that fills up takes part of a write: without this, the next line would be glued to the half one.
            if written:
                os.ftruncate(self._descriptor, before)
            raise

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        try:
            # An earlier writer may have been killed in the middle of a line.
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
