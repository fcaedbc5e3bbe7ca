"""Bounds of a client: timeouts of an answer, tries of a request, answers in flight. None of them reads a clock."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass

from craton.formatting import setting
from craton.ml.serving.clients.errors import ClientClosedError, RequestRefusedError


@dataclass(frozen=True)
class Timeouts:
    """Seconds; 0: no limit. Retries do not extend them."""

    connect: float = 10.0
    first_token: float = 600.0  # from the submit on, which includes the endpoint's queue
    between_tokens: float = 120.0
    whole: float = 0.0

    def look(self, started: float, heard: float | None, now: float) -> tuple[str, float | None]:
        """Return the reason why an answer is too late, if it is, and else when to look again: then (None: never), and
        with its first token.

        `heard`: when its newest token came; None: it has none."""
        deadlines = []
        if self.whole:
            deadlines.append((started + self.whole, f"not finished after {setting(self.whole)} (timeouts.whole)"))
        if heard is None and self.first_token:
            reason = f"no token after {setting(self.first_token)} (timeouts.first_token)"
            deadlines.append((started + self.first_token, reason))
        if heard is not None and self.between_tokens:
            reason = f"no further token for {setting(self.between_tokens)} (timeouts.between_tokens)"
            deadlines.append((heard + self.between_tokens, reason))
        if not deadlines:
            return "", None
        deadline, reason = min(deadlines)
        return (reason, None) if now >= deadline else ("", deadline)


@dataclass(frozen=True)
class Retries:
    """How often a request is tried again, and for how long: with exponential backoff and jitter."""

    max_tries: int = 5  # the first one included
    max_seconds: float = 120.0  # from the first try to the last
    first_delay: float = 0.5
    max_delay: float = 20.0

    def delay(
        self, tries: int, elapsed_seconds: float, retry_seconds: float | None, generator: random.Random
    ) -> float | None:
        """Return the seconds before the next try, after so many; None: give up. `retry_seconds`: the endpoint's
        advice, which is a minimum."""
        backoff = min(self.first_delay * 2.0 ** (tries - 1), self.max_delay) * generator.uniform(0.5, 1.0)
        seconds = max(backoff, retry_seconds or 0.0)
        is_over = tries >= self.max_tries or elapsed_seconds + seconds > self.max_seconds
        return None if is_over else seconds


class Slots:
    """A number of answers that may be in flight. Who asks first is served first."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise RequestRefusedError(f"max_in_flight is {limit}; it must be 1 or more")
        self.limit = limit
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait until `count` slots are free, and take them."""
        if count > self.limit:
            raise RequestRefusedError(
                f"a request with {count} copies does not fit max_in_flight {self.limit}; ask for fewer copies at a time"
            )
        if not self._waiting and self.taken + count <= self.limit:
            self.taken += count
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, future)
        self._waiting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give(count)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()
            raise

    def take_now(self, count: int) -> None:
        """Take slots beyond the limit if need be: a fork cannot wait, for its caller has to read the parent."""
        self.taken += count

    def give(self, count: int = 1) -> None:
        self.taken -= count
        self._serve()

    def close(self) -> None:
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ClientClosedError("the client was closed"))

    def _serve(self) -> None:
        while self._waiting and self.taken + self._waiting[0][0] <= self.limit:
            count, future = self._waiting.popleft()
            if not future.done():
                self.taken += count
                future.set_result(None)
