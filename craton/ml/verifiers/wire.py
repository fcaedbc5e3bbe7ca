"""Messages between the pool, its supervisor and the workers: a length, then that many bytes.

What a sandboxed process sends is read as JSON, never unpickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("!I")
READ_BYTES = 1 << 18


class MessageTooLongError(ValueError):
    """A process sent more than it may."""


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Inbox:
    """Splits a stream of bytes into messages of at most `limit` bytes."""

    def __init__(self, limit: int = (1 << 32) - 1) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._limit:
                raise MessageTooLongError(f"a message of {length} bytes; at most {self._limit} are allowed")
            if len(self._bytes) < _LENGTH.size + length:
                return
            message = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            yield message


class Channel:
    """A socket that never blocks: what cannot be sent yet is kept and sent later."""

    def __init__(self, connection: socket.socket, limit: int = (1 << 32) - 1) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._inbox = Inbox(limit)
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        self._unsent += framed(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the other side takes; one that is gone is noticed by `receive`."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived, None once the other side is gone."""
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._inbox.take(data)) if data else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


class BlockingChannel:
    """The workers' side: one message in, one message out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self) -> bytes | None:
        header = self._read(_LENGTH.size)
        return None if header is None else self._read(_LENGTH.unpack(header)[0])

    def send(self, message: bytes) -> None:
        data = memoryview(framed(message))
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _read(self, length: int) -> bytes | None:
        found = bytearray()
        while len(found) < length:
            data = os.read(self._descriptor, min(READ_BYTES, length - len(found)))
            if not data:
                return None
            found += data
        return bytes(found)
