"""Messages between processes as bytes: JSON for small or rare values, raw columns for the numbers of a step.

No pickle: a peer can send wrong numbers, but no code. Parsing checks every length and type and raises `WireError`.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from craton.errors import CratonError

MAX_MESSAGE_BYTES = 2**30  # log-probabilities of a long prompt with 20 alternatives each take a tenth of that
_MAX_COLUMNS = 16
_HEADS = [
    struct.Struct(f"<BIB{count}Q") for count in range(_MAX_COLUMNS)
]  # kind, bytes of JSON, number of columns, bytes of each
_COLUMNS_AT = struct.calcsize("<BI")
_JSON, _PARSER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()

Check = Callable[[Any], bool]


class WireError(CratonError):
    """Bytes that are not a valid message."""


def pack(kind: int, values: Any, columns: Sequence[Any] = ()) -> bytes:
    """Serialize `values` as JSON, and arrays as raw columns."""
    text = b"" if values is None else _JSON.encode(values).encode()
    blobs = [column.tobytes() for column in columns]
    return b"".join([_HEADS[len(blobs)].pack(kind, len(text), len(blobs), *map(len, blobs)), text, *blobs])


def unpack(data: bytes) -> tuple[int, Any, list[bytes]]:
    """Return (kind, values, columns)."""
    try:
        head = _HEADS[data[_COLUMNS_AT]]
        kind, text_bytes, _, *lengths = head.unpack_from(data)
        end = head.size + text_bytes
        values = _PARSER.decode(data[head.size : end].decode()) if text_bytes else None
    except (IndexError, struct.error, ValueError, RecursionError) as error:
        raise WireError(f"cannot parse a message: {error}") from error
    if end + sum(lengths) != len(data):
        raise WireError(f"a message has {len(data):,} bytes; its header states {end + sum(lengths):,}")
    columns = []
    for length in lengths:
        columns.append(data[end : end + length])
        end += length
    return kind, values, columns


def integers(column: bytes) -> list[int]:
    return _numbers("q", column)


def reals(column: bytes) -> list[float]:
    return _numbers("d", column)


def expect(values: Any, *checks: Check) -> list[Any]:
    """Return `values`, a list with one value per check; raise if one fails its check."""
    if type(values) is not list or len(values) != len(checks):
        raise WireError(f"a message has {_size(values)} values; expected {len(checks)}")
    for index, (value, check) in enumerate(zip(values, checks, strict=True)):
        if not check(value):
            raise WireError(f"value {index} of a message is invalid (type {type(value).__name__})")
    return values


def is_integer(value: Any) -> bool:
    return type(value) is int


def is_real(value: Any) -> bool:
    return type(value) is float or type(value) is int


def is_text(value: Any) -> bool:
    return type(value) is str


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_anything(value: Any) -> bool:
    return True


def is_mapping(value: Any) -> bool:
    return type(value) is dict


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def receive_bytes(line: Connection) -> bytes:
    """Return the next message of a connection. Raise EOFError or OSError if it is closed."""
    return line.recv_bytes(MAX_MESSAGE_BYTES)


def _numbers(code: str, column: bytes) -> list[Any]:
    numbers = array(code)
    try:
        numbers.frombytes(column)
    except ValueError as error:
        raise WireError(f"a column of numbers has {len(column)} bytes; expected a multiple of 8") from error
    return numbers.tolist()


def _size(values: Any) -> str:
    return str(len(values)) if type(values) is list else f"a {type(values).__name__} instead of a list of"
