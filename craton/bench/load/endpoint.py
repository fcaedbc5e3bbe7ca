"""The edge that talks HTTP: tries a server before a load, and streams one answer after the other during it.

What a server refuses before the load is an `EndpointError` that says what to do. During the load nothing is raised:
whatever goes wrong with a request is its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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
from craton.nearest import did_you_mean

# Servers of uvicorn close idle connections after 5 s. A request sent into a connection that is just being closed would
# fail for no fault of the server's, so ours are not used again when they were idle for longer than this.
_IDLE_SECONDS = 2.0
_TRIAL_TOKENS = 16
_TRIAL_WORDS = (16, 144)
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class LoadTarget:
    """Where to send requests, and what to ask beside the prompt."""

    url: str
    model: str | None = None  # None: the first that the server names
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
        """Asks which models there are, and holds the wanted one against them."""
        try:
            async with self._session.get(f"{self.target.base}/v1/models") as response:
                status, text = response.status, await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._error(_unreachable(error)) from None
        self._check_key(status)
        names = _model_names(text) if status == 200 else []
        if self.model and names and self.model not in names:
            raise self._error(f"no model {self.model!r}; it has {', '.join(names)}{did_you_mean(self.model, names)}")
        if not self.model and not names:
            raise self._error(f"does not say which models it has (HTTP {status} at /v1/models); give one with --model")
        self.model = self.model or names[0]

    async def find_form(self, vocabulary: int, seed: int) -> tuple[Ids | Words, str]:
        """What prompts can be made of, and, where it is not what was wanted, why."""
        note = ""
        if not self.target.chat:
            form = Ids(vocabulary)
            answer = await self._try(Request(trial_prompt(_TRIAL_TOKENS, form, seed), 2))
            if answer.error in ("", EMPTY):
                return form, ""
            note = (
                f"prompts are words: the server refuses token ids below --vocabulary {vocabulary} "
                f"({answer.error}: {answer.error_detail})"
            )
        counts = []
        for words in _TRIAL_WORDS:
            answer = await self.try_out(Request(trial_prompt(words, Words(), seed), 2))
            counts.append(answer.prompt_tokens)
        few, many = counts
        if few is None or many is None or many <= few:
            return Words(), f"{note}; " * bool(note) + "the server gives no usage: a word is taken for a token"
        per_word = (many - few) / (_TRIAL_WORDS[1] - _TRIAL_WORDS[0])
        return Words(per_word, max(0.0, few - per_word * _TRIAL_WORDS[0])), note

    async def try_out(self, request: Request) -> StreamedResponse:
        """One request before the load. Errors that every request would have are raised."""
        answer = await self._try(request)
        # A model may find that nothing is to be said; the server is all right.
        if answer.error not in ("", EMPTY):
            raise self._error(f"does not answer a trial request ({answer.error}: {answer.error_detail})")
        return answer

    def encode(self, request: Request) -> bytes:
        """The body of a request. Temperature 0, so that the same seed asks for the same work."""
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
        """Sends one request and feeds the answer until its end; never raises for what the network or server does."""
        try:
            async with self._session.post(self._address, data=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
                    answer.error_detail = _message(await response.text(errors="replace"))
                    return
                read = response.content.readany
                while data := await read():
                    answer.feed(data, perf_counter())
        except TimeoutError:
            answer.error, answer.error_detail = "timeout", f"not ended after {setting(self.target.timeout_seconds)}"
        except aiohttp.ClientPayloadError:
            pass  # the stream ended too early, which the answer itself says
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
                    message = _message(await response.text(errors="replace"))
                    raise self._error(f"answers HTTP {response.status} at {self.target.path} ({message})")
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
                    answer.error_detail = _message(await response.text(errors="replace"))
                    return answer
                if response.content_type != "text/event-stream":
                    raise self._error(
                        f"answers without streaming ({response.content_type} instead of text/event-stream); only "
                        "a stream can be timed token by token"
                    )
                while data := await response.content.readany():
                    answer.feed(data, perf_counter())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._error(_unreachable(error)) from None
        answer.close()
        return answer

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            problem = "refuses this API key" if self.target.api_key else "asks for an API key"
            raise self._error(f"{problem} (HTTP {status}); give one with --api-key or in OPENAI_API_KEY")

    def _error(self, problem: str) -> EndpointError:
        return EndpointError(f"{self.target.base}: {problem}")


@contextlib.asynccontextmanager
async def connect(target: LoadTarget) -> AsyncIterator[Endpoint]:
    """As many connections as requests run; the load alone decides how many that are."""
    if not target.url.startswith(("http://", "https://")):
        raise EndpointError(f"{target.url}: a server's address begins with http:// or https://")
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
    """Every running request holds a file descriptor, and many systems allow a process 1,024 of them unless it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _unreachable(error: Exception) -> str:
    if isinstance(error, aiohttp.InvalidURL):
        return "not an address"
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno
        # asyncio words a refused connection as a failed call; of an unknown name the number is not one of the system's.
        reason = os.strerror(code) if code and code > 0 else error.os_error.strerror or error
        return f"no server answers there ({reason}); is it running, and is the port right?"
    if isinstance(error, asyncio.TimeoutError):
        return "the server takes connections but does not answer; see --timeout"
    return f"what answers there does not speak HTTP as a server should ({str(error) or type(error).__name__})"


def _model_names(text: str) -> list[str]:
    try:
        return [str(entry["id"]) for entry in json.loads(text)["data"]]
    except (ValueError, TypeError, KeyError):
        return []


def _message(text: str) -> str:
    """What a server says of an error: the sentence in its JSON where there is one."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        document = json.loads(text)
        document = document.get("error", document.get("detail", document))
        text = document["message"] if isinstance(document, dict) and "message" in document else document
    return " ".join(str(text).split())[:_SHOWN_CHARACTERS] or "no reason given"
