"""Connection limits, so that a slow or greedy client affects no other client. A peer that keeps the server waiting, for
the rest of a request or for taking the response, has a time limit. With too many connections, the one that has kept the
server waiting the longest is closed. Connections whose request is being processed are never closed for others.
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # of a request line and its headers; h11 has its own limit, httptools has none


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds that a peer may keep the server waiting, and connections that may be open."""

    head_seconds: float  # for a request line and its headers, from the connection or the last response on
    body_seconds: float  # for the whole request
    write_seconds: float  # until it takes the data sent to it
    per_peer: int  # connections; all clients behind a proxy are one peer
    total: int

    @property
    def max_connections(self) -> int:
        """Return the limit, at most half of the files that the process may open."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.total if soft == resource.RLIM_INFINITY else min(self.total, soft // 2)


class _Bounded:
    """Mixin for both uvicorn protocols, before them in the method resolution order."""

    limits: ClassVar[ConnectionLimits]
    # Uvicorn's:
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    connections: set[Any]
    client: tuple[str, int] | None
    cycle: Any
    flow: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self.waits_since = time.monotonic()
        self._timer = self.loop.call_later(self.limits.head_seconds, self._look)
        total = self.limits.max_connections
        per_peer = min(self.limits.per_peer, total)
        if len(self.connections) <= per_peer:
            return
        mine = [other for other in self.connections if other.client and other.client[0] == self._address]
        if len(mine) > per_peer:
            self._make_room(mine)
        elif len(self.connections) > total:
            self._make_room(list(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def on_response_complete(self) -> None:
        self.waits_since = time.monotonic()
        super().on_response_complete()  # type: ignore[misc]

    def pause_writing(self) -> None:
        self.waits_since = time.monotonic()
        super().pause_writing()  # type: ignore[misc]

    @property
    def patience_seconds(self) -> float | None:
        """Return how long the peer may take for its next action; None when it is the server's turn."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            return self.limits.head_seconds
        if self.flow.write_paused:
            return self.limits.write_seconds
        if cycle.more_body:
            return self.limits.body_seconds
        return None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _look(self) -> None:
        patience = self.patience_seconds
        late = time.monotonic() - self.waits_since
        if self.transport.is_closing() or (patience is not None and late >= patience):
            self.transport.abort()
            return
        rest = self.limits.head_seconds if patience is None else min(patience - late, self.limits.head_seconds)
        self._timer = self.loop.call_later(rest, self._look)

    def _make_room(self, among: list[Any]) -> None:
        waiting = [other for other in among if other.patience_seconds is not None and other is not self]
        closed = min(waiting, key=lambda other: other.waits_since, default=self)
        self.connections.discard(closed)  # uvicorn removes it later, and it must not be chosen twice
        closed.transport.abort()


class BoundedH11(_Bounded, H11Protocol):
    """Limits for uvicorn's pure Python protocol."""


class BoundedHttpTools(_Bounded, HttpToolsProtocol):
    """Limits for httptools, several times faster than h11 for streams of small chunks, as model servers send."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_bytes = 0
        self._is_in_head = True
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers exceed {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._take_host_of_target()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def _take_host_of_target(self) -> None:
        """Use the host of an absolute target (`GET http://HOST/path`) instead of the Host header (RFC 9112, 3.2.2). h11
        passes such a target on as a path, which no Craton server has."""
        if self.url.startswith(b"/") or b"://" not in self.url:
            return
        host = self.url.partition(b"://")[2].partition(b"/")[0]
        place = next((at for at, (name, _) in enumerate(self.headers) if name == b"host"), None)
        if place is None:
            self.headers.append((b"host", host))
        else:
            self.headers[place] = (b"host", host)
