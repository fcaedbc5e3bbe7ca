"""Connections that have not proved yet that they know the run's secret.

There are never more than a few of them: when another one comes, the oldest is shut down. So strangers who hold
connections open cannot use up the threads and descriptors of an agent or a keeper. A peer of the run proves the secret
within milliseconds, and one that was crowded out dials again.
"""

from __future__ import annotations

import contextlib
import socket
import threading

MAX_STRANGERS = 128


class Strangers:
    """Any thread may call. Whoever added a connection still closes it."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections[connection] = None
            if len(self._connections) > self._limit:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it

    def remove(self, connection: socket.socket) -> None:
        """It proved the secret, or is closed."""
        with self._lock:
            self._connections.pop(connection, None)
