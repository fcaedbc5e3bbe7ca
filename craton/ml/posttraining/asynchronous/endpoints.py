"""Where completions are generated: endpoints with free places, of which some may be lost for a while.

All methods are for one event loop. A request waits until an endpoint is ready and has room; the lowest prompt index is
served first, so that those with the earliest deadlines begin first.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from craton.ml.serving.clients import InferenceClient


@dataclass(eq=False)
class RolloutEndpoint:
    """One endpoint. `version` is that of the weights which it is known to have: it may have newer ones."""

    name: str
    client: InferenceClient
    limit: int  # copies that it generates at a time
    version: int = 0
    version_offset: int = 0  # of the versions that it reports, from ours
    is_ready: bool = True
    has_versions: bool = True
    continues: bool = True  # requests with tokens that were generated before
    has_seeds: bool = True
    in_flight: int = 0
    reason: str = ""  # why it is not ready


@dataclass(order=True)
class _Waiting:
    index: int
    number: int
    copies: int = field(compare=False)
    future: asyncio.Future[RolloutEndpoint] = field(compare=False)


class Endpoints:
    """`when_lost` is called when requests of an endpoint fail, and may have it restored later. `when_closed` is
    awaited before the clients are closed."""

    def __init__(
        self,
        when_lost: Callable[[RolloutEndpoint], None] | None = None,
        when_closed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.endpoints: list[RolloutEndpoint] = []
        self.num_lost = 0  # requests that were continued after an endpoint was lost
        self._when_lost, self._when_closed = when_lost, when_closed
        self._waiting: list[_Waiting] = []
        self._numbers = count()

    def add(self, endpoint: RolloutEndpoint) -> None:
        self.endpoints.append(endpoint)
        self.serve()

    async def take(self, index: int, copies: int = 1) -> RolloutEndpoint:
        """Wait for an endpoint with room for the copies of a prompt index, and take it."""
        future: asyncio.Future[RolloutEndpoint] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(index, next(self._numbers), copies, future)
        heapq.heappush(self._waiting, waiting)
        self.serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result(), copies)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise

    def give(self, endpoint: RolloutEndpoint, copies: int = 1) -> None:
        """Give back what was taken."""
        endpoint.in_flight -= copies
        self.serve()

    def lose(self, endpoint: RolloutEndpoint, reason: str) -> None:
        """Send no further requests to an endpoint until it is ready again."""
        self.num_lost += 1
        if endpoint.is_ready:
            endpoint.is_ready, endpoint.reason = False, reason
            if self._when_lost is not None:
                self._when_lost(endpoint)

    def restore(self, endpoint: RolloutEndpoint, version: int) -> None:
        """Use an endpoint that has the weights of this version."""
        endpoint.is_ready, endpoint.version, endpoint.reason = True, version, ""
        self.serve()

    def serve(self) -> None:
        """Give free places to those who wait."""
        while self._waiting:
            first = self._waiting[0]
            if first.future.done():
                heapq.heappop(self._waiting)
                continue
            # A group larger than the limit is generated alone.
            able = [item for item in self.endpoints if item.is_ready and _has_room(item, first.copies)]
            if not able:
                return
            heapq.heappop(self._waiting)
            chosen = min(able, key=lambda item: item.in_flight / item.limit)
            chosen.in_flight += first.copies
            first.future.set_result(chosen)

    async def close(self) -> None:
        if self._when_closed is not None:
            await self._when_closed()
        for waiting in self._waiting:
            waiting.future.cancel()
        for endpoint in self.endpoints:
            await endpoint.client.close()


def _has_room(endpoint: RolloutEndpoint, copies: int) -> bool:
    return not endpoint.in_flight or endpoint.in_flight + copies <= endpoint.limit
