"""What clients of HTTP servers share: connections, tries of a request, and the way from events to answers.

A try that fails before any token (no connection, 429, 503) is repeated within `Retries`. A stream that breaks off is
continued where the endpoint can do that, and otherwise fails, with what had come. API keys appear in no error: a
server's own message may quote the key.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from craton.formatting import setting
from craton.ml.serving.clients.answer import Answer, AnswerDelta
from craton.ml.serving.clients.bounds import Retries, Timeouts
from craton.ml.serving.clients.capabilities import Capabilities
from craton.ml.serving.clients.client import MAX_IN_FLIGHT, InferenceClient
from craton.ml.serving.clients.errors import (
    BrokenStreamError,
    EndpointUnavailableError,
    InferenceError,
    ProtocolError,
    RequestRefusedError,
    ServerFailedError,
)
from craton.ml.serving.clients.event_stream import EventFormatError, EventReader
from craton.ml.serving.clients.http_replies import error_message, model_cards, unreachable_reason
from craton.nearest import did_you_mean

MAX_REPLY_BYTES = 16 << 20  # of a reply that is no stream
MAX_ERROR_BYTES = 64 << 10
IDLE_SECONDS = 2.0  # servers close idle connections after 5 s; one that is just being closed would fail a request
MAX_RETRY_AFTER = 3600.0
MAX_CHUNKS, MAX_CHARACTERS = 4, 512  # for each token of max_tokens; more is not stored

Result = TypeVar("Result")


class HttpClient(InferenceClient):
    """`model`: its name on the server; None: the first that the server lists."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        random_seed: int | None = None,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = base.rpartition("@")[2].partition("?")[0]  # without a password or a key
            raise RequestRefusedError(f"{shown!r} is not a URL; it must begin with http:// or https://")
        if parts.username or parts.password:
            raise RequestRefusedError(f"the URL of {parts.hostname} has a user name or password; give a key as api_key")
        super().__init__(base, timeouts, max_in_flight, random_seed)
        self.model = model
        self.retries = retries or Retries()
        self._key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Answer, asyncio.Task[None]] = {}  # that read the stream of each; copies may share one
        self._cards: list[dict[str, object]] | None = None
        self._capabilities: Capabilities | None = None
        self._asking = asyncio.Lock()

    async def capabilities(self) -> Capabilities:
        async with self._asking:
            if self._capabilities is None:
                await self.models()
                self._capabilities = await self._find_capabilities()
        return self._capabilities

    @abstractmethod
    async def _find_capabilities(self) -> Capabilities: ...

    async def models(self) -> list[dict[str, object]]:
        """Return the cards of the server's models; it is asked once. Check the client's model, or choose the first."""
        if self._cards is None:
            try:
                self._cards = model_cards(await self._get("/v1/models"))
            except (RequestRefusedError, ServerFailedError, ProtocolError):
                if self.model is None:
                    raise
                self._cards = []  # not every server lists its models; requests will show whether it has this one
            names = [str(card["id"]) for card in self._cards]
            if self.model is None and not names:
                raise ProtocolError(f"{self.endpoint}: lists no models at /v1/models; name one as `model`")
            if self.model is not None and names and self.model not in names:
                known = f"{', '.join(names)}{did_you_mean(self.model, names)}"
                raise RequestRefusedError(f"{self.endpoint}: no model {self.model!r}; available: {known}")
            self.model = self.model or names[0]
        return self._cards

    # -- answers ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _read_answers(self, answers: list[Answer]) -> None:
        """Make one try: send a request and read the stream until all these answers have ended."""

    @abstractmethod
    def _can_continue(self, answer: Answer) -> bool:
        """Whether an answer that broke off can be continued exactly."""

    def _run(self, answers: list[Answer], tries: int = 0, began: float | None = None) -> None:
        """Read answers in the background, with retries: together if all are open, for their seeds follow each other."""
        still_open = [answer for answer in answers if answer in self._open]
        for group in [answers] if len(still_open) == len(answers) else [[answer] for answer in still_open]:
            self._read_in_background(group, self._try_answers(group, tries, began))

    def _read_in_background(self, answers: list[Answer], work: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(work)
        self._tasks.update(dict.fromkeys(answers, task))
        task.add_done_callback(lambda _: self._check_ended(task, answers))

    def _check_ended(self, task: asyncio.Task[None], answers: list[Answer]) -> None:
        """Fail the answers of a task that ended by an unexpected exception: their readers must not wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for answer in answers:
                if self._tasks.get(answer) is task:
                    self._fail(answer, InferenceError(f"{self.endpoint}: {type(error).__name__}: {error}"))

    async def _try_answers(self, answers: list[Answer], tries: int, began: float | None) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time() if began is None else began
        while True:
            tries += 1
            received = sum(answer.num_deltas for answer in answers)
            try:
                await self._read_answers(answers)
                error: InferenceError = BrokenStreamError(f"{self.endpoint}: the stream ended before the answer")
            except InferenceError as failure:
                error = failure
            if sum(answer.num_deltas for answer in answers) > received:  # limits are for tries without any progress
                tries, began = 1, loop.time()
            num_answers = len(answers)
            answers = [answer for answer in answers if not answer.is_done]
            can_retry = isinstance(error, EndpointUnavailableError | BrokenStreamError)
            for answer in list(answers):
                if not can_retry or (answer.has_begun and not self._can_continue(answer)):
                    self._fail(answer, _with_count(error, answer))
                    answers.remove(answer)
            if not answers:
                return
            advice = error.retry_seconds if isinstance(error, EndpointUnavailableError) else None
            seconds = self.retries.delay(tries, loop.time() - began, advice, self._random)
            if seconds is None:
                spent = f"gave up after {tries} tries in {setting(round(loop.time() - began, 1))}"
                for answer in answers:
                    self._fail(answer, type(error)(f"{_with_count(error, answer)}; {spent}"))
                return
            for answer in answers:
                answer.remote = None
            await asyncio.sleep(seconds)
            answers = [answer for answer in answers if not answer.is_done]
            if len(answers) < num_answers or any(answer.has_begun for answer in answers):
                for answer in answers:  # each has its own tokens, and their seeds no longer follow each other
                    self._run([answer], tries, began)
                return

    def _abort(self, answer: Answer) -> None:
        task = self._tasks.get(answer)
        others = [other for other, shared in self._tasks.items() if shared is task and other is not answer]
        if task is not None and not others:
            task.cancel()  # which closes its connection
        elif task is not None:
            self._abort_copy(answer)

    def _add(self, answer: Answer, delta: AnswerDelta) -> None:
        super()._add(answer, delta)
        limit = answer.request.sampling.max_tokens
        is_too_long = answer.num_characters > MAX_CHARACTERS * (limit + 1)
        if is_too_long or max(len(answer.tokens), answer.num_deltas) > MAX_CHUNKS * (limit + 1):
            raise ProtocolError(f"{self.endpoint}: the answer does not end, and is far longer than max_tokens {limit}")

    def _abort_copy(self, answer: Answer) -> None:
        """End one of several answers of a stream."""
        raise AssertionError("copies of this client have streams of their own")

    def _forget(self, answer: Answer) -> None:
        super()._forget(answer)
        self._tasks.pop(answer, None)

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # -- HTTP -------------------------------------------------------------------------------------------------------

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Send a request and yield the events of its stream."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect or None)
        reader = EventReader()
        has_head = False
        try:
            async with self._connect().post(
                self.endpoint + path, data=json.dumps(body).encode(), timeout=timeout, allow_redirects=False
            ) as response:
                await self._check_status(response, path)
                if response.content_type != "text/event-stream":
                    raise ProtocolError(
                        f"{self.endpoint}: {path} does not stream: it replies {response.content_type} instead of "
                        "text/event-stream"
                    )
                has_head = True
                while not reader.is_done and (data := await response.content.readany()):
                    for event in reader.feed(data):
                        self._check_event(event)
                        yield event
        except EventFormatError as error:
            raise ProtocolError(self._without_key(f"{self.endpoint}: {error}")) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if has_head:
                reason = f"{self.endpoint}: the connection broke off ({type(error).__name__})"
                raise BrokenStreamError(reason) from None
            raise self._unreachable(error) from None

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._exchange("GET", path, None)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._exchange("POST", path, json.dumps(body).encode())

    async def _exchange(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """Send a request whose reply is a JSON object, with retries."""
        text = await self._with_retries(lambda: self._try_exchange(method, path, body))
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            message = self._without_key(error_message(text))
            raise ProtocolError(f"{self.endpoint}: {path} replies no JSON object: {message}")
        return document

    async def _with_retries(self, action: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat an action while the endpoint is unavailable."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for tries in count(1):
            try:
                return await action()
            except EndpointUnavailableError as error:
                seconds = self.retries.delay(tries, loop.time() - began, error.retry_seconds, self._random)
                if seconds is None:
                    raise EndpointUnavailableError(f"{error}; gave up after {tries} tries") from None
                await asyncio.sleep(seconds)
        raise AssertionError("tries are limited")

    async def _try_exchange(self, method: str, path: str, data: bytes | None) -> str:
        timeouts = self.timeouts
        timeout = aiohttp.ClientTimeout(total=timeouts.first_token or None, sock_connect=timeouts.connect or None)
        try:
            async with self._connect().request(
                method, self.endpoint + path, data=data, timeout=timeout, allow_redirects=False
            ) as response:
                await self._check_status(response, path)
                text = await _read(response, MAX_REPLY_BYTES)
                if not response.content.at_eof():
                    raise ProtocolError(f"{self.endpoint}: {path} replies more than {MAX_REPLY_BYTES:,} bytes")
                return text
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from None

    def _connect(self) -> aiohttp.ClientSession:
        self._expect_open()
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            # Slots limit the connections.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    async def _check_status(self, response: aiohttp.ClientResponse, path: str) -> None:
        status = response.status
        if status == 200:
            return
        message = self._without_key(error_message(await _read(response, MAX_ERROR_BYTES)))
        text = f"{self.endpoint}: HTTP {status} at {path} ({message})"
        if status in (401, 403):
            problem = "refuses this API key" if self._key else "requires an API key"
            raise RequestRefusedError(f"{self.endpoint}: {problem} (HTTP {status}: {message})")
        if status in (429, 503):
            raise EndpointUnavailableError(text, _retry_after(response.headers.get("Retry-After", "")))
        if 300 <= status < 400:
            raise ProtocolError(f"{text}; redirects are not followed, use the address that it names")
        if status >= 500:
            raise ServerFailedError(text)
        raise RequestRefusedError(text)

    def _check_event(self, event: Mapping[str, Any]) -> None:
        if not (error := event.get("error")):
            return
        message = self._without_key(error_message(json.dumps({"error": error})))
        kind = error.get("type") if isinstance(error, dict) else None
        failure = RequestRefusedError if kind == "invalid_request_error" else BrokenStreamError
        raise failure(f"{self.endpoint}: {message}")

    def _unreachable(self, error: Exception) -> EndpointUnavailableError:
        return EndpointUnavailableError(self._without_key(f"{self.endpoint}: {unreachable_reason(error)}"))

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    data = bytearray()
    while len(data) < max_bytes and (chunk := await response.content.read(max_bytes - len(data))):
        data += chunk
    return data.decode(errors="replace")


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header; a date in it is ignored."""
    return min(float(value), MAX_RETRY_AFTER) if value.isascii() and value.isdigit() else None


def _with_count(error: InferenceError, answer: Answer) -> InferenceError:
    """Return the error, with how much of the answer had come."""
    if not answer.has_begun:
        return error
    return type(error)(f"{error} after {answer.num_tokens} tokens of the answer")
