"""The front end's side of the connection to the engine: requests go out, replies come in and find who waits for them.

The event loop never waits for the engine: messages are sent by a thread, and read when the connection has some. (Were
both sides to write a long message at once from their only thread, neither would read.) Everybody who waits is woken,
with the reason, when the engine fails or its end of the connection closes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from craton.formatting import setting
from craton.ml.serving.messages import (
    Abort,
    Control,
    EngineReply,
    Failed,
    OutputDelta,
    Ready,
    Request,
    Sampling,
    Stats,
    Submit,
)
from craton.ml.serving.server.errors import ApiError, ClientGoneError, TooSlowError, UnavailableError
from craton.ml.serving.server.wire import Wire
from craton.ml.serving.wire import Message, WireError

MAX_HELD_VALUES = 1 << 18  # tokens and alternatives of one request that its client has not taken; about 10 MB

logger = logging.getLogger("craton.serving")


class EngineLink:
    """One engine. `ready` is None until it can take requests; `failure` says why it no longer does."""

    def __init__(self, wire: Wire) -> None:
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stats = Stats()
        self._heard = time.monotonic()  # when the engine last said anything
        self.on_end: Callable[[int], None] = lambda num_failed: None  # told how many requests the engine left open
        self._wire = wire
        self._ids = count(1)
        self._exchanges: dict[int, Exchange] = {}  # by the id of each of their submits
        self._waiting: set[Exchange] = set()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: SimpleQueue[Request | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="to-engine", daemon=True)

    def start(self) -> None:
        """From now on, in the running loop, replies are read."""
        asyncio.get_running_loop().add_reader(self._wire.fileno(), self._read)
        self._sender.start()

    def close(self) -> None:
        """What was sent so far still reaches the engine."""
        self._outbox.put(None)
        self._sender.join(timeout=5)
        if self.failure is None:
            asyncio.get_running_loop().remove_reader(self._wire.fileno())
        self._wire.close()

    @property
    def waiting(self) -> int:
        """Requests that have no token yet."""
        return len(self._waiting)

    @property
    def exchanges(self) -> set[Exchange]:
        """Those with a request that has not ended."""
        return set(self._exchanges.values())

    @property
    def silent_seconds(self) -> float:
        """How long an engine that has something to do, and tells how it does twice a second, has said nothing."""
        return time.monotonic() - self._heard if self._exchanges and self.ready is not None else 0.0

    def working(self) -> Ready:
        """What the engine said when it could take requests; an error while, or when, it cannot."""
        if self.failure is not None:
            raise UnavailableError(f"the engine has failed: {self.failure}", code="engine_failed")
        if self.ready is None:
            raise UnavailableError("the model is being loaded; ask again soon", code="loading", retry_seconds=1)
        return self.ready

    async def control(self, name: str, arguments: Mapping[str, Any] | None = None) -> EngineReply:
        """The engine's answer, whatever it is; later ones find the engine in the state this one put it in."""
        self.working()
        number = next(self._ids)
        future: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._outbox.put(Control(number, name, dict(arguments or {})))
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    def note_state(self, state: str, refusal: str | None = None) -> None:
        """The state after a control that has changed it, until the engine's next report."""
        self.stats = replace(self.stats, state=state, refusal=self.stats.refusal if refusal is None else refusal)

    def note_adapters(self, adapters: Iterable[str]) -> None:
        assert self.ready is not None
        self.ready = replace(self.ready, adapters=tuple(adapters))

    def fail_all(self, error: ApiError) -> None:
        """Ends every open request with this error."""
        for exchange in self.exchanges:
            exchange.fail(error)

    def _submit(self, exchange: Exchange, prompt: tuple[int, ...], options: dict[str, Any]) -> int:
        self.working()
        number = next(self._ids)
        if not self._exchanges:  # until now nothing was expected of it
            self._heard = time.monotonic()
        self._exchanges[number] = exchange
        self._waiting.add(exchange)
        self._outbox.put(Submit(number, prompt, **options))
        return number

    def _abort(self, number: int, index: int | None) -> None:
        if self.failure is None:
            self._outbox.put(Abort(number, index))

    def _begun(self, exchange: Exchange) -> None:
        self._waiting.discard(exchange)

    def _forget(self, number: int) -> None:
        self._exchanges.pop(number, None)

    def _read(self) -> None:
        """Whatever the engine has said; it is called again when there is more."""
        try:
            for reply in self._wire.read():
                self._heard = time.monotonic()
                self._take(reply)
                if self.failure is not None:
                    return
        except (EOFError, OSError):
            self._end("its process has ended")
        except WireError as error:
            self._end(f"it sent what is not a message: {error}")

    def _take(self, reply: Message) -> None:
        if isinstance(reply, list):
            for piece in reply:
                # Pieces of a request that has been aborted may still be on their way.
                if (exchange := self._exchanges.get(piece.id)) is not None:
                    exchange.put(piece)
        elif isinstance(reply, Stats):
            self.stats = reply
        elif isinstance(reply, EngineReply):
            future = self._answers.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)
        elif isinstance(reply, Ready):
            self.ready = reply
            logger.info("ready: %s, up to %d tokens", reply.model, reply.max_length)
        elif isinstance(reply, Failed):
            self._end(reply.reason)

    def _end(self, reason: str) -> None:
        self.failure = reason
        asyncio.get_running_loop().remove_reader(self._wire.fileno())
        logger.error("the engine has failed: %s", reason)
        error = UnavailableError(f"the engine has failed: {reason}", code="engine_failed")
        self.on_end(len(self.exchanges))
        self.fail_all(error)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._wire.write(message)
            except OSError:
                return  # the reader sees the end of the connection too, and says so


class Exchange:
    """What one HTTP request asks of the engine, and gets. Closing it aborts what has not ended."""

    def __init__(self, link: EngineLink, timeout_seconds: float = 0.0) -> None:
        self.has_begun = False
        self.adapters: set[str] = set()  # that its requests are for
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, set[int]] = {}  # copies that have not ended, by submit
        self._pieces: list[OutputDelta] = []
        self._num_held = 0  # tokens and alternatives among these
        self._waiter: asyncio.Future[None] | None = None
        self._problem: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds:
            error = TooSlowError(f"the answer took longer than {setting(timeout_seconds)}", code="timeout")
            self._timer = self._loop.call_later(timeout_seconds, self.fail, error)

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        copies: int = 1,
        priority: int = 0,
        adapter: str | None = None,
    ) -> int:
        options = {"sampling": sampling, "copies": copies, "priority": priority, "adapter": adapter}
        number = self._link._submit(self, prompt, options)
        self._open[number] = set(range(copies))
        if adapter is not None:
            self.adapters.add(adapter)
        return number

    async def pieces(self) -> list[OutputDelta]:
        """What came since the last call, at least one. Raises why there will be none."""
        while not self._pieces:
            if self._problem is not None:
                raise self._problem
            self._waiter = self._loop.create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        self._num_held = 0
        return pieces

    def end(self, number: int, index: int) -> None:
        """This copy is complete for us, though the engine would go on."""
        if index in self._open.get(number, ()):
            self._link._abort(number, index)
            self._ended(number, index)

    def client_gone(self) -> None:
        self.fail(ClientGoneError())

    def fail(self, problem: Exception) -> None:
        if self._problem is None:
            self._problem = problem
            self._pieces.clear()
            self._wake()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._open):
            self._link._abort(number, None)
            self._link._forget(number)
        self._open.clear()
        self._link._begun(self)

    def put(self, piece: OutputDelta) -> None:
        if self._problem is not None or piece.index not in self._open.get(piece.id, ()):
            return
        if not self.has_begun:
            self.has_begun = True
            self._link._begun(self)
        self._pieces.append(piece)
        self._num_held += sum(len(alternative.tokens) for alternative in piece.alternatives) + len(piece.tokens)
        if self._num_held > MAX_HELD_VALUES:
            self._link._abort(piece.id, None)
            self.fail(TooSlowError("the client does not take its answer; it was given up", code="slow_client"))
        if piece.finish is not None:
            self._ended(piece.id, piece.index)
        self._wake()

    def _ended(self, number: int, index: int) -> None:
        self._open[number].discard(index)
        if not self._open[number]:
            del self._open[number]
            self._link._forget(number)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
