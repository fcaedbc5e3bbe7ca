"""Messages on a socket that nobody may wait for: `message_bytes`, framed as multiprocessing.connection frames bytes.

The engine's end is a `multiprocessing.connection.Connection`. This end cannot be one: an event loop needs a socket that
does not block, and a Connection takes a message of which only a part has come for a broken one.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from craton.ml.serving.wire import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

READ_BYTES = 1 << 20
PATIENCE_SECONDS = 1e6  # a timeout, however long, makes Python wait for a socket that does not block itself

_LENGTH = struct.Struct("!i")
_LONG_LENGTH = struct.Struct("!Q")
_IS_LONG = -1  # in place of a length that has no room there


class Wire:
    """One end of a pair of sockets. Reading never waits; writing may, and belongs into a thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[Message]:
        """The messages that are complete by now. EOFError or OSError when no more will come, WireError when what came
        is not one."""
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
        """The first message in the buffer, taken out of it; None: it is not whole yet."""
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
            raise WireError(f"a message says that it has {length:,} bytes; at most {MAX_MESSAGE_BYTES:,} are read")
        if len(self._buffer) < begin + length:
            return None
        message = bytes(self._buffer[begin : begin + length])
        del self._buffer[: begin + length]
        return message
