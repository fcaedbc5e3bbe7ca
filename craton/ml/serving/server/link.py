"""The front end's side of the connection to the engine: sends requests and dispatches replies to their waiters.

The event loop never waits for the engine: a thread sends messages, and the loop reads when data is available. (If both
sides wrote a long message from their only thread, they would deadlock.) If the engine fails or closes the connection,
all waiters get the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Fork,
    ForkBranch,
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

MAX_HELD_VALUES = 1 << 18  # tokens and alternatives of one request that its client has not received; about 10 MB

logger = logging.getLogger("craton.serving")


class EngineLink:
    """The connection to one engine. `ready` is None until it accepts requests; `failure` says why it no longer does."""

    def __init__(self, wire: Wire) -> None:
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stats = Stats()
        self._heard = time.monotonic()  # time of the engine's last message
        self.on_end: Callable[[int], None] = lambda num_failed: None  # called with the number of open requests
        self._wire = wire
        self._ids = count(1)
        self._exchanges: dict[int, Exchange] = {}  # by the id of each of their submits
        self._waiting: set[Exchange] = set()
        self._controls: dict[int, float] = {}  # when each was sent, monotonic
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: SimpleQueue[Request | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="to-engine", daemon=True)

    def start(self) -> None:
        """Start reading replies in the running event loop, and sending requests."""
        asyncio.get_running_loop().add_reader(self._wire.fileno(), self._read)
        self._sender.start()

    def close(self) -> None:
        """Close the connection after sending all queued messages."""
        self._outbox.put(None)
        self._sender.join(timeout=5)
        if self.failure is None:
            asyncio.get_running_loop().remove_reader(self._wire.fileno())
        self._wire.close()

    @property
    def waiting(self) -> int:
        """Return the number of requests without a token."""
        return len(self._waiting)

    @property
    def exchanges(self) -> set[Exchange]:
        """Return the exchanges with open requests."""
        return set(self._exchanges.values())

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the last message of an engine with open requests; it reports twice a second."""
        return time.monotonic() - self._heard if self._exchanges and self.ready is not None else 0.0

    @property
    def control_seconds(self) -> float:
        """Return for how long the engine has worked on a control, such as an update of its weights; 0: none."""
        return time.monotonic() - min(self._controls.values()) if self._controls else 0.0

    def working(self) -> Ready:
        """Return the engine's Ready message; raise while it loads or after it failed."""
        if self.failure is not None:
            raise UnavailableError(f"the engine has failed: {self.failure}", code="engine_failed")
        if self.ready is None:
            raise UnavailableError("the model is loading; retry soon", code="loading", retry_seconds=1)
        return self.ready

    async def control(self, name: str, arguments: Mapping[str, Any] | None = None) -> EngineReply:
        """Send a control and return the engine's reply; controls run in order. One whose waiter is cancelled is
        dropped, or waits no longer for weights."""
        self.working()
        number = next(self._ids)
        future: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._controls[number] = time.monotonic()
        self._outbox.put(Control(number, name, dict(arguments or {})))
        try:
            return await future
        except asyncio.CancelledError:
            self._abort(number, None)
            raise
        finally:
            self._answers.pop(number, None)
            self._controls.pop(number, None)

    def note_state(self, state: str, refusal: str | None = None) -> None:
        """Set the state that a control has changed, until the engine's next report."""
        self.stats = replace(self.stats, state=state, refusal=self.stats.refusal if refusal is None else refusal)

    def note_adapters(self, adapters: Iterable[str]) -> None:
        assert self.ready is not None
        self.ready = replace(self.ready, adapters=tuple(adapters))

    def fail_all(self, error: ApiError) -> None:
        """End every open request with this error."""
        for exchange in self.exchanges:
            exchange.fail(error)

    def _submit(self, exchange: Exchange, prompt: tuple[int, ...], options: dict[str, Any]) -> int:
        self.working()
        number = next(self._ids)
        if not self._exchanges:  # an idle engine need not have reported
            self._heard = time.monotonic()
        self._exchanges[number] = exchange
        self._await_token(exchange)
        self._outbox.put(Submit(number, prompt, **options))
        return number

    def _fork(self, exchange: Exchange, parent: int, index: int, samplings: Sequence[Sampling]) -> list[int]:
        self.working()
        branches = tuple(ForkBranch(next(self._ids), sampling) for sampling in samplings)
        numbers = [branch.id for branch in branches]
        if not self._exchanges:  # an idle engine need not have reported
            self._heard = time.monotonic()
        self._exchanges.update(dict.fromkeys(numbers, exchange))
        self._await_token(exchange)
        self._outbox.put(Fork(parent, branches, index))
        return numbers

    def _abort(self, number: int, index: int | None) -> None:
        if self.failure is None:
            self._outbox.put(Abort(number, index))

    def _await_token(self, exchange: Exchange) -> None:
        """Count an exchange as waiting until its first token; what it submits after that is no new request."""
        if not exchange.has_begun:
            self._waiting.add(exchange)

    def _begun(self, exchange: Exchange) -> None:
        self._waiting.discard(exchange)

    def _forget(self, number: int) -> None:
        self._exchanges.pop(number, None)

    def _read(self) -> None:
        """Read the engine's messages; called when data is available."""
        try:
            for reply in self._wire.read():
                self._heard = time.monotonic()
                self._take(reply)
                if self.failure is not None:
                    return
        except (EOFError, OSError):
            self._end("its process exited")
        except WireError as error:
            self._end(f"it sent an invalid message: {error}")

    def _take(self, reply: Message) -> None:
        if isinstance(reply, list):
            for piece in reply:
                # Deltas of an aborted request may still arrive.
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
            self.stats = replace(self.stats, weights_version=reply.weights_version)
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
                return  # the reader sees the closed connection too, and reports it


class Exchange:
    """The engine requests and outputs of one HTTP request. Closing it aborts those that have not ended."""

    def __init__(self, link: EngineLink, timeout_seconds: float = 0.0) -> None:
        self.has_begun = False
        self.heard_at = time.monotonic()  # of the newest delta
        self.adapters: set[str] = set()  # of its requests
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, set[int]] = {}  # copies that have not ended, by submit
        self._pieces: list[OutputDelta] = []
        self._num_held = 0  # tokens and alternatives among these
        self._waiter: asyncio.Future[None] | None = None
        self._problem: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds:
            error = TooSlowError(f"the request timed out after {setting(timeout_seconds)}", code="timeout")
            self._timer = self._loop.call_later(timeout_seconds, self.fail, error)

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        copies: int = 1,
        priority: int = 0,
        adapter: str | None = None,
        generated: tuple[int, ...] = (),
    ) -> int:
        options = {"sampling": sampling, "copies": copies, "priority": priority, "adapter": adapter}
        options["generated"] = generated
        number = self._link._submit(self, prompt, options)
        self._open[number] = set(range(copies))
        if adapter is not None:
            self.adapters.add(adapter)
        return number

    def fork(self, parent: int, index: int, samplings: Sequence[Sampling]) -> list[int]:
        """Fork a copy of one of these requests; return the id of a new request for each sampling.

        Their deltas come with the others. If the copy has ended, they end with an error."""
        numbers = self._link._fork(self, parent, index, samplings)
        self._open.update({number: {0} for number in numbers})
        return numbers

    async def pieces(self) -> list[OutputDelta]:
        """Wait for deltas; return those since the last call, at least one. Raise if there will be none."""
        while not self._pieces:
            if self._problem is not None:
                raise self._problem
            self._waiter = self._loop.create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        self._num_held = 0
        return pieces

    def end(self, number: int, index: int) -> None:
        """End a copy whose text is complete, for example at a stop string."""
        if index in self._open.get(number, ()):
            self._link._abort(number, index)
            self._ended(number, index)

    def abort(self, number: int, index: int) -> None:
        """Abort a copy; its last delta says so."""
        if index in self._open.get(number, ()):
            self._link._abort(number, index)
            self.put(OutputDelta(number, index, finish="abort"))

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
        self.heard_at = time.monotonic()
        if not self.has_begun:
            self.has_begun = True
            self._link._begun(self)
        self._pieces.append(piece)
        self._num_held += sum(len(alternative.tokens) for alternative in piece.alternatives) + len(piece.tokens)
        if self._num_held > MAX_HELD_VALUES:
            self._link._abort(piece.id, None)
            self.fail(TooSlowError("the client does not read its answer; the request was aborted", code="slow_client"))
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
