"""Messages on a non-blocking socket: `message_bytes`, framed as multiprocessing.connection frames bytes.

The engine's end is a `multiprocessing.connection.Connection`. This end cannot be one: an event loop needs a
non-blocking socket, and a Connection fails on a message that has only partly arrived.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from craton.ml.serving.wire import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

READ_BYTES = 1 << 20
PATIENCE_SECONDS = 1e6  # with any timeout set, Python makes the socket non-blocking and waits itself

_LENGTH = struct.Struct("!i")
_LONG_LENGTH = struct.Struct("!Q")
_IS_LONG = -1  # marks a length that follows in 8 bytes


class Wire:
    """One end of a socket pair. Reading never waits; writing may, so do it on a thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[Message]:
        """Yield the complete messages. Raise EOFError or OSError if the connection is closed, WireError for an invalid
        message."""
        try:
            data = os.read(self._socket.fileno(), READ_BYTES)  # the socket's own recv would wait
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._buffer += data
        while (message := self._next()) is not None:
            yield decode(message)

    def write(self, message: Message) -> None:
        data = encode(message)
        if len(data) < 1 << 31:
            header = _LENGTH.pack(len(data))
        else:
            header = _LENGTH.pack(_IS_LONG) + _LONG_LENGTH.pack(len(data))
        self._socket.sendall(header + data)

    def close(self) -> None:
        self._socket.close()

    def _next(self) -> bytes | None:
        """Remove and return the first message of the buffer; None if it is incomplete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        begin = _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length == _IS_LONG:
            begin += _LONG_LENGTH.size
            if len(self._buffer) < begin:
                return None
            (length,) = _LONG_LENGTH.unpack_from(self._buffer, _LENGTH.size)
        if not 0 <= length <= MAX_MESSAGE_BYTES:
            raise WireError(f"message length {length:,} exceeds the limit of {MAX_MESSAGE_BYTES:,} bytes")
        if len(self._buffer) < begin + length:
            return None
        message = bytes(self._buffer[begin : begin + length])
        del self._buffer[: begin + length]
        return message
