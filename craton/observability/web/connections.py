"""Connections cost whoever opens them, and not those who look at the page. A peer that keeps the server waiting, for
the rest of a request or until it takes its answer, is waited for a while only; and when there are too many connections,
the one that has been waited for longest makes room. Nobody's token is needed for that.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

WAIT_SECONDS = 10.0
MOST_OF_A_PEER = 128  # connections; a browser has six at most, but all who come through a proxy are one peer
MOST_CONNECTIONS = 512
END_SECONDS = 1  # streams are open for as long as a page is; they are not waited for


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """How the page is served. h11 bounds the size of a request's head, which uvicorn's other parser does not."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="on",
        access_log=False,
        timeout_graceful_shutdown=END_SECONDS,
        **{"log_level": "warning", **options},
    )


class BoundedConnection(H11Protocol):
    """One connection, which is closed when it is waited for too long, or when others need its place."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since = time.monotonic()
        self._timer = self.loop.call_later(WAIT_SECONDS, self._look)
        everybody = [each for each in self.connections if isinstance(each, BoundedConnection)]
        mine = [each for each in everybody if _peer(each) == _peer(self)]
        if len(mine) > MOST_OF_A_PEER:
            self._make_room(mine)
        elif len(everybody) > _most_connections():
            self._make_room(everybody)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.waits_since = time.monotonic()
        super().pause_writing()

    @property
    def is_waiting(self) -> bool:
        """Whether it is the peer's turn: to send the rest of a request, or to take what was answered."""
        asked: RequestResponseCycle | None = self.cycle
        return asked is None or asked.response_complete or asked.more_body or self.flow.write_paused

    def _look(self) -> None:
        late = time.monotonic() - self.waits_since
        if self.transport.is_closing() or (self.is_waiting and late >= WAIT_SECONDS):
            self.transport.abort()
            return
        rest = WAIT_SECONDS - late if self.is_waiting else WAIT_SECONDS
        self._timer = self.loop.call_later(rest, self._look)

    def _make_room(self, among: list[BoundedConnection]) -> None:
        waiting = [each for each in among if each.is_waiting and each is not self]
        closed = min(waiting, key=lambda each: each.waits_since, default=self)
        self.connections.discard(closed)  # it is told that it is lost later, and must not be chosen twice
        closed.transport.abort()


def _peer(connection: BoundedConnection) -> str:
    return connection.client[0] if connection.client else ""


def _most_connections() -> int:
    """Half of the files that a process may have open, where that is less: runs are read meanwhile."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // 2)
