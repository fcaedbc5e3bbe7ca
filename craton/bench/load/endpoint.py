"""The HTTP client: checks a server before a load, and streams answers during it.

A server that fails the check raises an `EndpointError` with the remedy. During the load nothing is raised: a failure is
recorded as the request's error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import aiohttp

from craton.bench.load.answer import EMPTY, StreamedResponse
from craton.bench.load.errors import EndpointError
from craton.bench.load.requests import Ids, Request, Words, trial_prompt
from craton.formatting import setting
from craton.ml.serving.clients import error_message, model_cards, unreachable_reason
from craton.nearest import did_you_mean

# Uvicorn closes idle connections after 5 s. A request on a connection that is just being closed would fail without a
# fault of the server, so connections are not reused after they were idle for longer than this.
_IDLE_SECONDS = 2.0
_TRIAL_TOKENS = 16
_TRIAL_WORDS = (16, 144)


@dataclass(frozen=True)
class LoadTarget:
    """The server to send requests to, and request options."""

    url: str
    model: str | None = None  # None: the server's first
    chat: bool = False
    api_key: str | None = None
    ignore_eos: bool = False
    timeout_seconds: float = 600.0

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


class Endpoint:
    """An open connection pool to one server. `model` is known after `find_model`."""

    def __init__(self, target: LoadTarget, session: aiohttp.ClientSession) -> None:
        self.target = target
        self.model = target.model or ""
        self._session = session
        self._address = target.base + target.path

    async def find_model(self) -> None:
        """List the server's models and check the requested one."""
        try:
            async with self._session.get(f"{self.target.base}/v1/models") as response:
                status, text = response.status, await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._error(_unreachable(error)) from None
        self._check_key(status)
        names = _model_names(text) if status == 200 else []
        if self.model and names and self.model not in names:
            available = ", ".join(names)
            raise self._error(f"no model {self.model!r}; available: {available}{did_you_mean(self.model, names)}")
        if not self.model and not names:
            raise self._error(f"lists no models (HTTP {status} at /v1/models); name one with --model")
        self.model = self.model or names[0]

    async def find_form(self, vocabulary: int, seed: int) -> tuple[Ids | Words, str]:
        """Return the form of prompts, token ids if the server accepts them, else words; and a note if it is words."""
        note = ""
        if not self.target.chat:
            form = Ids(vocabulary)
            answer = await self._try(Request(trial_prompt(_TRIAL_TOKENS, form, seed), 2))
            if answer.error in ("", EMPTY):
                return form, ""
            note = (
                f"prompts are words: the server rejects random token ids below --vocabulary {vocabulary} "
                f"({answer.error}: {answer.error_detail})"
            )
        counts = []
        for words in _TRIAL_WORDS:
            answer = await self.try_out(Request(trial_prompt(words, Words(), seed), 2))
            counts.append(answer.prompt_tokens)
        few, many = counts
        if few is None or many is None or many <= few:
            return Words(), f"{note}; " * bool(note) + "the server reports no usage: a word counts as one token"
        per_word = (many - few) / (_TRIAL_WORDS[1] - _TRIAL_WORDS[0])
        return Words(per_word, max(0.0, few - per_word * _TRIAL_WORDS[0])), note

    async def try_out(self, request: Request) -> StreamedResponse:
        """Send one request before the load; raise if it fails."""
        answer = await self._try(request)
        # An empty answer is fine: the model may stop at once.
        if answer.error not in ("", EMPTY):
            raise self._error(f"fails a trial request ({answer.error}: {answer.error_detail})")
        return answer

    def encode(self, request: Request) -> bytes:
        """Return the body of a request, with temperature 0, so that the same seed gives the same work."""
        body: dict[str, Any] = {"model": self.model}
        if self.target.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        body |= {"max_tokens": request.output_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.target.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    async def stream(self, body: bytes, answer: StreamedResponse) -> None:
        """Send one request and feed the answer until its end; never raise for network or server errors."""
        try:
            async with self._session.post(self._address, data=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
                    answer.error_detail = error_message(await response.text(errors="replace"))
                    return
                read = response.content.readany
                while data := await read():
                    answer.feed(data, perf_counter())
        except TimeoutError:
            answer.error, answer.error_detail = "timeout", f"not finished after {setting(self.target.timeout_seconds)}"
        except aiohttp.ClientPayloadError:
            pass  # `close` reports the truncated stream
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.error_detail = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            answer.error, answer.error_detail = "connection lost", str(error) or type(error).__name__
        answer.close()

    async def _try(self, request: Request) -> StreamedResponse:
        answer = StreamedResponse()
        try:
            async with self._session.post(self._address, data=self.encode(request)) as response:
                self._check_key(response.status)
                if response.status in (404, 405):
                    message = error_message(await response.text(errors="replace"))
                    raise self._error(f"returns HTTP {response.status} at {self.target.path} ({message})")
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
                    answer.error_detail = error_message(await response.text(errors="replace"))
                    return answer
                if response.content_type != "text/event-stream":
                    raise self._error(
                        f"does not stream ({response.content_type} instead of text/event-stream); token latencies need "
                        "a stream"
                    )
                while data := await response.content.readany():
                    answer.feed(data, perf_counter())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._error(_unreachable(error)) from None
        answer.close()
        return answer

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            problem = "rejects this API key" if self.target.api_key else "requires an API key"
            raise self._error(f"{problem} (HTTP {status}); give one with --api-key or in OPENAI_API_KEY")

    def _error(self, problem: str) -> EndpointError:
        return EndpointError(f"{self.target.base}: {problem}")


@contextlib.asynccontextmanager
async def connect(target: LoadTarget) -> AsyncIterator[Endpoint]:
    """Open a client without a limit on connections: the load alone decides how many there are."""
    if not target.url.startswith(("http://", "https://")):
        raise EndpointError(f"{target.url}: not a URL; it must begin with http:// or https://")
    _allow_connections()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=target.timeout_seconds),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    async with session:
        yield Endpoint(target, session)


def _allow_connections() -> None:
    """Raise the limit of open files: every running request uses one, and the default is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _unreachable(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "the server accepts connections but does not answer; see --timeout"
    return unreachable_reason(error)


def _model_names(text: str) -> list[str]:
    try:
        return [str(card["id"]) for card in model_cards(json.loads(text))]
    except ValueError:
        return []
