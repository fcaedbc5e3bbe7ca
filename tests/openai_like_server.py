"""A small real HTTP server that speaks OpenAI's protocol as far as a load test needs it, written for these tests.

It computes nothing: a "model" whose prompt takes `first_seconds` and each further piece `gap_seconds`, so that what a
client measures can be held against what is known. `Behaviour` has the ways in which servers differ and fail.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from waiting import PATIENCE_SECONDS

CHARACTERS_PER_TOKEN = 2.0  # of texts; ids are one token each
TEMPLATE_TOKENS = 10  # of every chat


@dataclass
class Behaviour:
    """How the server acts. Tests change it between requests."""

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    tokens_per_piece: int = 1
    at_once: int = 10_000  # how many requests it works on; the others wait
    models: tuple[str, ...] = ("tiny",)
    key: str | None = None
    vocabulary: int = 50_000  # ids from here on are refused
    takes_ids: bool = True
    streams: bool = True
    usage: bool = True
    continues_messages: bool = False  # takes continue_final_message; otherwise it ignores the field
    keeps_white_space: bool = True  # at the end of a message that it continues
    cached_tokens: int | None = None
    lists_models: bool = True
    fails: dict[int, str] = field(default_factory=dict)  # request number -> what happens to it
    received: list[dict[str, Any]] = field(default_factory=list)  # bodies, in the order of their arrival
    most_running: int = 0


class Server:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.url = ""
        self._running = 0
        self._places = asyncio.Semaphore(behaviour.at_once)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**26)
        application.router.add_get("/v1/models", self.models)
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_post("/v1/chat/completions", self.complete)
        return application

    async def models(self, request: web.Request) -> web.Response:
        self._check_key(request)
        if not self.behaviour.lists_models:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.behaviour.models]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        body = await request.json()
        behaviour = self.behaviour
        if body["model"] not in behaviour.models:
            return _error(404, f"The model `{body['model']}` does not exist.")
        chat = request.path.endswith("/chat/completions")
        prompt = self._rendered(body) if chat else body["prompt"]
        if isinstance(prompt, list) and not behaviour.takes_ids:
            return _error(400, "prompt: input should be a valid string")
        if isinstance(prompt, list) and max(prompt) >= behaviour.vocabulary:
            return _error(400, f"token id {max(prompt)} is out of vocabulary")
        number = len(behaviour.received)
        behaviour.received.append(body)
        if not behaviour.streams:
            return web.json_response({"choices": [{"text": "no stream", "finish_reason": "stop"}]})
        fault = behaviour.fails.get(number, "")
        if fault.isdecimal():
            return _error(int(fault), "overloaded, come back later")
        self._running += 1
        behaviour.most_running = max(behaviour.most_running, self._running)
        try:
            return await self._stream(request, body, prompt, chat, fault)
        finally:
            self._running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompt: str | list[int], chat: bool, fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self._places:
            pieces = 0
            async for event in self._events(body, prompt, chat, fault):
                if fault == "cut" and pieces == 3:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if fault == "hang" and pieces == 3:
                    await asyncio.Event().wait()
                await response.write(event)
                pieces += 1
        await response.write_eof()
        return response

    async def _events(
        self, body: dict[str, Any], prompt: str | list[int], chat: bool, fault: str
    ) -> AsyncIterator[bytes]:
        behaviour, tokens = self.behaviour, body["max_tokens"]
        if chat:  # who speaks, before anything is computed
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        await asyncio.sleep(behaviour.first_seconds)
        sent = 0
        while sent < tokens and fault not in ("empty", "error"):
            if sent:
                await asyncio.sleep(behaviour.gap_seconds)
            sent = min(tokens, sent + behaviour.tokens_per_piece)
            piece = {"delta": {"content": 'wör"d '}} if chat else {"text": 'wör"d '}
            yield _event({"choices": [{**piece, "finish_reason": None}]})
        if fault == "error":
            yield _event({"error": {"message": "the engine broke", "code": 500}})
            return
        ending = {"delta": {}} if chat else {"text": ""}
        yield _event({"choices": [{**ending, "finish_reason": "abort" if fault == "abort" else "length"}]})
        if behaviour.usage and body.get("stream_options", {}).get("include_usage"):
            yield _event({"choices": [], "usage": self._usage(prompt, sent)})
        yield b"data: [DONE]\n\n"

    def _rendered(self, body: dict[str, Any]) -> str:
        """What a chat template makes of the messages: each with a frame around it, the last one perhaps open."""
        frame = " " * round(TEMPLATE_TOKENS * CHARACTERS_PER_TOKEN)
        contents = [message["content"] for message in body["messages"]]
        if not (self.behaviour.continues_messages and body.get("continue_final_message")):
            return "".join(content + frame for content in contents)
        *before, last = contents
        last = last if self.behaviour.keeps_white_space else last.rstrip()
        return "".join(content + frame for content in before) + last

    def _usage(self, prompt: str | list[int], sent: int) -> dict[str, Any]:
        tokens = len(prompt) if isinstance(prompt, list) else round(len(prompt) / CHARACTERS_PER_TOKEN)
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": sent}
        if self.behaviour.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.behaviour.cached_tokens}
        return usage

    def _check_key(self, request: web.Request) -> None:
        key = self.behaviour.key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized


@contextmanager
def openai_like_server(behaviour: Behaviour | None = None) -> Iterator[Server]:
    """A server on a free port of this machine, in a thread of its own."""
    loop = asyncio.new_event_loop()
    server = Server(behaviour or Behaviour())
    runner = web.AppRunner(server.application(), shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, name="openai-like-server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=PATIENCE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=PATIENCE_SECONDS)
        loop.close()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "error"}}, status=status)
