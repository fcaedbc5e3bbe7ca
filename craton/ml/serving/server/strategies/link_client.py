"""An `InferenceClient` over the front end's connection to the engine, for strategies that run in the front end.

All requests of a client belong to one exchange, that is to one HTTP request: it counts as one waiting request, its
timeout covers all of them, and whatever ends it (a disconnected client, a drain, a failed engine) ends them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from craton.ml.serving.clients import (
    AnswerTimeoutError,
    ClientClosedError,
    EndpointUnavailableError,
    EngineTexts,
    InferenceError,
    InferenceRequest,
    Timeouts,
    TokenClient,
)
from craton.ml.serving.messages import OutputDelta, Sampling
from craton.ml.serving.server.errors import ApiError, TooSlowError
from craton.ml.serving.server.link import EngineLink, Exchange
from craton.ml.serving.server.metrics import Metrics, ServerMeter
from craton.ml.serving.text import ChatTemplate, Vocabulary

ENDPOINT = "the engine"  # its name in errors
Result = TypeVar("Result")
NO_TIMEOUTS = Timeouts(connect=0, first_token=0, between_tokens=0)  # the exchange has the server's


class LinkClient(TokenClient):
    """Use it as a context manager: closing it aborts what is open. `failure` is why it ended before."""

    def __init__(
        self,
        link: EngineLink,
        exchange: Exchange,
        metrics: Metrics,
        vocabulary: Vocabulary | None,
        template: ChatTemplate | None,
        max_in_flight: int,
    ) -> None:
        super().__init__(ENDPOINT, EngineTexts(vocabulary, template, ENDPOINT), NO_TIMEOUTS, max_in_flight)
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._link = link
        self._exchange = exchange
        self._metrics = metrics
        self._meters: dict[int, ServerMeter] = {}
        self._has_tokenizer = vocabulary is not None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def has_grammars(self) -> bool:
        return self._has_tokenizer

    async def weights_version(self) -> int:
        return self._link.stats.weights_version

    def _aside(self, work: Callable[[], Result]) -> Awaitable[Result]:
        return asyncio.to_thread(work)

    def _send(self, prompt: tuple[int, ...], request: InferenceRequest, copies: int) -> tuple[int, None]:
        self._expect_exchange()
        sampling = request.sampling
        meter = self._metrics.meter(len(prompt), copies, sampling.max_tokens)
        try:
            number = self._exchange.submit(
                prompt, sampling, copies, request.priority, request.adapter, request.generated
            )
        except ApiError as error:
            raise _in_words(error) from error
        self._meters[number] = meter
        return number, None

    def _send_fork(self, number: int, copy: int, samplings: Sequence[Sampling]) -> tuple[list[int], None]:
        self._expect_exchange()
        try:
            numbers = self._exchange.fork(number, copy, samplings)
        except ApiError as error:
            raise _in_words(error) from error
        for branch, sampling in zip(numbers, samplings, strict=True):
            self._meters[branch] = self._metrics.meter(0, 1, sampling.max_tokens)
        return numbers, None

    def _end_copy(self, number: int, copy: int) -> None:
        self._exchange.end(number, copy)

    async def _close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        self._exchange.close()

    async def _read(self) -> None:
        """Give answers what comes, until the exchange fails or the client is closed."""
        try:
            while True:
                deltas = await self._exchange.pieces()
                self._count(deltas)
                self._dispatch(deltas)
        except Exception as error:  # noqa: BLE001 -- whatever ends the exchange, its answers must hear of it
            self.failure.set_result(error)
            self._fail_open(_in_words(error))

    def _count(self, deltas: Sequence[OutputDelta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            if (meter := self._meters.get(delta.id)) is not None:
                meter.note(delta, now, delta.finish)

    def _expect_exchange(self) -> None:
        if self.failure.done():
            raise _in_words(self.failure.result())


def _in_words(error: Exception) -> InferenceError:
    """Return the error of an exchange as a client's."""
    if isinstance(error, TooSlowError):
        return AnswerTimeoutError(f"{ENDPOINT}: {error}")
    if isinstance(error, ApiError):
        return EndpointUnavailableError(f"{ENDPOINT}: {error}", error.retry_seconds)
    return ClientClosedError(f"{ENDPOINT}: {type(error).__name__}: {error}")
