"""Connections whose other side has not proved yet that it knows the key. Each is asked in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Generic, Protocol, TypeVar

NEWCOMERS = 64  # that may be asked at once


class KeyedLine(Protocol):
    """A connection, and who is at its other end."""

    connection: Connection[Any, Any]
    other: str

    def close(self) -> None: ...


LineT = TypeVar("LineT", bound=KeyedLine)


class Newcomers(Generic[LineT]):
    """Connections whose other side has not proved yet that it knows the key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._lines: list[LineT] = []
        self._known: list[LineT] = []
        self._is_closed = False
        self.strangers = ""

    def add(self, line: LineT) -> None:
        """Ask a newcomer for the key. Of too many, the one that is silent for longest is left alone."""
        with self._lock:
            self._lines.append(line)
            oldest = self._lines.pop(0) if len(self._lines) > NEWCOMERS else None
        if oldest is not None:
            _shut(oldest)
        threading.Thread(target=self._ask, args=(line,), name="weights newcomer", daemon=True).start()

    def first(self) -> LineT | None:
        """Return one that knows the key; it is the caller's."""
        with self._lock:
            return self._known.pop(0) if self._known else None

    def close(self) -> None:
        """Leave all others alone."""
        with self._lock:
            self._is_closed = True
            lines = [*self._lines, *self._known]
        for line in lines:
            _shut(line)

    def _ask(self, line: LineT) -> None:
        try:
            deliver_challenge(line.connection, self._key)
            answer_challenge(line.connection, self._key)
        except (AuthenticationError, OSError, EOFError, ValueError):
            knows = False
        else:
            knows = True
        with self._lock:
            if line in self._lines:
                self._lines.remove(line)
            is_taken = knows and not self._is_closed
            if is_taken:
                self._known.append(line)
            elif not knows:
                self.strangers = f"; {line.other} connected with a wrong key"
        if not is_taken:
            line.close()


def _shut(line: KeyedLine) -> None:
    """End what a thread waits for; it then closes the connection itself."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)
