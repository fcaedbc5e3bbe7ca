"""The answers to one HTTP request, from the engine's output deltas to a JSON body or an event stream.

A stream begins with the engine's first delta, so a refusal by the engine still has its HTTP status. A request whose
client disconnects, or that takes too long, is aborted in the engine, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from craton.ml.serving.messages import Alternatives, OutputDelta, Sampling, seed_of_copy
from craton.ml.serving.server.errors import ApiError, BadRequestError, BrokenError, ClientGoneError, UnavailableError
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.metrics import ServerMeter
from craton.ml.serving.server.protocol import GenerationRequest
from craton.ml.serving.text import Addition, AnswerReader, Detokenizer, ThinkingCounter, TokenNumbers

DONE = b"data: [DONE]\n\n"
TOKEN_CHARACTERS = 4  # of a typical token

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class SubmittedPrompt:
    """A submitted prompt: its tokens, echo text, cached tokens and log-probs."""

    def __init__(
        self,
        tokens: tuple[int, ...],
        sampling: Sampling,
        meter: ServerMeter,
        echo: str = "",
        adapter: str | None = None,
    ) -> None:
        self.tokens = tokens
        self.adapter = adapter
        self.sampling = sampling
        self.meter = meter
        self.echo = echo  # its text, if the answer begins with it
        self.cached_tokens = 0
        self.logprobs: list[Alternatives | None] | None = None


class Choice:
    """One answer. `head` and `tail` are the JSON around the text of each of its chunks."""

    def __init__(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader) -> None:
        self.index = index
        self.prompt = prompt
        self.reader = reader
        self.seed = 0  # its own, with which it can be continued
        self.has_begun = False
        self.head = ""
        self.tail = ""
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.finish: str | None = None
        self.reason: str | int | None = None
        self.stop: tuple[float, int] | None = None  # log-probability and weights version of the stop token


AnyChoice = TypeVar("AnyChoice", bound=Choice)


class Answers(ABC, Generic[AnyChoice]):
    """The answers to one request; chats and completions differ in format."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, service: HttpService, request: GenerationRequest) -> None:
        self.exchange = service.exchange()
        self.vocabulary = service.vocabulary
        self.request = request
        self.choices: dict[tuple[int, int], AnyChoice] = {}
        self._service = service
        self._prompts: dict[int, SubmittedPrompt] = {}
        self._forced: dict[int, int] = {}  # requests that go on behind forced tokens, with the copy that they continue
        self._num_open = 0
        self.has_logprobs = False
        self.unsent = b""  # events that a stream still sends before its error
        self._envelope = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or service.name,
        }
        self._has_usage = request.stream_options is not None and request.stream_options.include_usage

    @property
    def id(self) -> str:
        """The id of the response, which a client needs to fork or abort it."""
        return str(self._envelope["id"])

    @property
    def is_done(self) -> bool:
        return not self._num_open

    def begin(self) -> None:
        """Let clients fork and abort it, until `close`."""
        self._service.running[self.id] = self

    def close(self) -> None:
        self.exchange.close()
        self._service.running.pop(self.id, None)

    async def submit(
        self,
        tokens: tuple[int, ...],
        sampling: Sampling,
        adapter: str | None,
        echo: str = "",
        keep_special: bool = False,
    ) -> None:
        """Send a prompt to the engine; its answers are the next `n` choices."""
        request = self.request
        generated = tuple(request.continue_from)
        assert sampling.seed is not None
        meter = self._service.metrics.meter(len(tokens), request.n, sampling.max_tokens)
        prompt = SubmittedPrompt(tokens, sampling, meter, echo, adapter)
        choices = []
        for copy in range(request.n):
            reader = self._reader(tokens, sampling, keep_special)
            choice = self.make_choice(len(self.choices) + copy, prompt, reader)
            self._prepare(choice, seed_of_copy(sampling.seed, copy))
            choices.append(choice)
        if generated:
            (choice,) = choices
            await self._service.aside(
                len(generated) * TOKEN_CHARACTERS, lambda: self.replay(choice, choice.reader.replay(generated))
            )
            self.check_replayed(choice)
            if choice.reader.is_stopped:  # the engine ends it at once
                sampling = replace(sampling, max_tokens=len(generated))
        number = self.exchange.submit(tokens, sampling, request.n, request.priority, adapter, generated)
        self._open(number, prompt, choices)

    async def pieces(self) -> list[OutputDelta]:
        """Wait for deltas; return those since the last call, at least one."""
        return await self.exchange.pieces()

    def read(self, pieces: list[OutputDelta]) -> bytes:
        """Process deltas; return the events that a stream sends for them. Raise if one ended with an error."""
        now = time.monotonic()
        for piece in pieces:
            if piece.id in self._forced:
                continue  # its prompt is that of the request before
            prompt = self._prompts[piece.id]
            prompt.cached_tokens = max(prompt.cached_tokens, piece.cached_tokens)
            if piece.prompt_logprobs is not None:
                prompt.logprobs = piece.prompt_logprobs
        events: list[str] = []
        for piece in pieces:
            choice = self.choices.get((piece.id, piece.index))
            if choice is None or choice.reader.is_complete:
                continue  # deltas behind the one that completed it, or behind forced tokens
            if piece.finish == "error":
                # A request that fails before its first token was invalid (for example a bad grammar), unless the engine
                # reports the error as its own.
                kind = BrokenError if choice.has_begun else UnavailableError if piece.is_ours else BadRequestError
                self.unsent = "".join(events).encode() if self.request.stream else b""
                raise kind(piece.error or "the engine ended the request", code="engine_refused")
            if self.request.max_tokens == 0:
                piece.tokens, piece.finish, piece.stop_token = [], "length", None
                self.exchange.end(piece.id, piece.index)
            addition = choice.reader.read(piece)
            if choice.reader.is_cut:
                self._force((piece.id, piece.index), choice, addition)
            if choice.reader.is_complete:
                self._num_open -= 1
                self.exchange.end(piece.id, piece.index)
            if piece.id in self._forced:
                piece = replace(piece, index=self._forced[piece.id])
            choice.prompt.meter.note(piece, now, addition.finish)
            choice.tokens += addition.tokens
            choice.versions += addition.versions
            choice.finish, choice.reason, choice.stop = addition.finish, addition.reason, addition.stop
            self.add(choice, addition, events)
            choice.has_begun = True
        return "".join(events).encode() if self.request.stream else b""

    def last_events(self) -> bytes:
        """Return the last events of a stream."""
        if not self._has_usage:
            return DONE
        chunk = {**self._envelope, "object": self.chunk_kind, "choices": [], "usage": self.usage()}
        return b"data: " + to_json(chunk).encode() + b"\n\n" + DONE

    def whole(self) -> bytes:
        """Return the body of a response that is not streamed."""
        choices = [
            self.whole_choice(choice) for choice in sorted(self.choices.values(), key=lambda choice: choice.index)
        ]
        body = {**self._envelope, "object": self.whole_kind, "choices": choices, "usage": self.usage()}
        return to_json({**body, **self.whole_extra()}).encode()

    @abstractmethod
    def make_choice(self, index: int, prompt: SubmittedPrompt, reader: AnswerReader) -> AnyChoice: ...

    def replay(self, choice: AnyChoice, text: str) -> None:
        """Take the text of the tokens that a choice continues from; it is not returned."""

    def check_replayed(self, choice: AnyChoice) -> None:
        """Raise if an answer cannot go on from the tokens that it continues from."""

    def closing_tokens(self) -> list[int]:
        """Return the tokens that end the thinking of an answer whose budget is spent."""
        raise AssertionError("only chats think")

    @abstractmethod
    def add(self, choice: AnyChoice, addition: Addition, events: list[str]) -> None:
        """Add a delta's text to a choice, and append the events that a stream sends for it."""

    @abstractmethod
    def whole_choice(self, choice: AnyChoice) -> dict[str, Any]: ...

    def whole_extra(self) -> dict[str, Any]:
        return {}

    def event(self, choice: AnyChoice, fields: dict[str, Any], extra: Mapping[str, Any] | None = None) -> str:
        """Return a chunk with more than text; `fields` are the choice's, `extra` the chunk's own."""
        chunk: dict[str, Any] = {**self._envelope, "object": self.chunk_kind}
        chunk["choices"] = [{"index": choice.index, **fields}]
        if self._has_usage:
            chunk["usage"] = None
        return f"data: {to_json({**chunk, **(extra or {})})}\n\n"

    def token_fields(self, tokens: list[int], versions: list[int]) -> dict[str, Any]:
        """Return the fields that `return_token_ids` adds to a choice."""
        return {"token_ids": tokens, "weights_versions": versions} if self.request.return_token_ids else {}

    def stop_fields(self, choice: AnyChoice) -> dict[str, Any]:
        """Return the fields that `return_token_ids` adds to a choice that a stop token ended."""
        if choice.stop is None or not self.request.return_token_ids:
            return {}
        logprob, version = choice.stop
        return {"stop_logprob": logprob, "stop_weights_version": version}

    def _reader(self, prompt: tuple[int, ...], sampling: Sampling, keep_special: bool = False) -> AnswerReader:
        words = self.vocabulary
        detokenizer = TokenNumbers() if words is None else Detokenizer(words, prompt, keep_special)
        has_scores = sampling.logprobs is not None
        return AnswerReader(detokenizer, self.request.stops(), sampling.min_tokens, has_scores, self.thinking())

    def thinking(self) -> ThinkingCounter | None:
        """Return what counts the thinking of a new choice; None: the answers have none."""
        return None

    def _force(self, key: tuple[int, int], choice: AnyChoice, addition: Addition) -> None:
        """End the thinking of a choice: its request goes on behind the closing tokens, as a new one."""
        closing, prompt = self.closing_tokens(), choice.prompt
        generated = (*self.request.continue_from, *choice.tokens, *addition.tokens, *closing)
        if len(generated) >= prompt.sampling.max_tokens:
            choice.reader.end_at_length(addition)
            return
        newest = (addition.versions or choice.versions)[-1:]
        forced = choice.reader.force(closing, newest * len(closing))
        addition.text += forced.text
        addition.tokens += forced.tokens
        addition.versions += forced.versions
        addition.scores += forced.scores
        addition.finish, addition.reason = forced.finish, forced.reason
        if choice.reader.is_complete:  # at a stop string
            return
        self.exchange.end(*key)
        del self.choices[key]
        sampling = replace(prompt.sampling, seed=choice.seed, prompt_logprobs=None)
        number = self.exchange.submit(prompt.tokens, sampling, 1, self.request.priority, prompt.adapter, generated)
        self._forced[number] = self._forced.get(key[0], key[1])
        self.choices[number, 0] = choice

    def _prepare(self, choice: AnyChoice, seed: int) -> None:
        choice.head, choice.tail = self._around(choice.index)
        choice.seed = seed

    def _open(self, number: int, prompt: SubmittedPrompt, choices: list[AnyChoice]) -> None:
        """Expect the deltas of a request that was sent to the engine."""
        self._prompts[number] = prompt
        self.has_logprobs |= prompt.sampling.logprobs is not None or prompt.sampling.prompt_logprobs is not None
        self._num_open += len(choices)
        self.choices.update({(number, copy): choice for copy, choice in enumerate(choices)})

    def _around(self, index: int) -> tuple[str, str]:
        """Return the JSON before and after the text of a chunk: made once, used for every token."""
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        usage = {"usage": None} if self._has_usage else {}
        choice = {"index": index, **self.text_fields(mark), "logprobs": None, "finish_reason": None}
        chunk = {**self._envelope, "object": self.chunk_kind, "choices": [choice], **usage}
        head, _, tail = f"data: {to_json(chunk)}\n\n".rpartition(f'"{mark}"')
        return head, tail

    @abstractmethod
    def text_fields(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice that adds this text."""

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt.tokens) for prompt in self._prompts.values())
        readers = [choice.reader for choice in self.choices.values()]
        completion = sum(reader.num_tokens - reader.num_replayed for reader in readers)
        continued = {"continued_tokens": len(self.request.continue_from)} if self.request.continue_from else {}
        return {
            "prompt_tokens": prompt,
            **continued,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in self._prompts.values())},
        }


async def respond(http: Request, answers: Answers[Any], ignored: list[str]) -> Response:
    """Return the answers as a body, or as a stream once the first of them begins. `ignored`: fields for
    X-Ignored-Fields."""
    headers = {"X-Ignored-Fields": ", ".join(map(header_text, ignored[:20]))} if ignored else {}
    watch = asyncio.create_task(_watch(http.receive, answers))
    is_handed_on = False
    answers.begin()
    try:
        events = answers.read(await answers.pieces())
        if answers.request.stream:
            is_handed_on = True
            return EventStream(answers, events, watch, headers)
        while not answers.is_done:
            answers.read(await answers.pieces())
        # Log-probs of a long text are megabytes of JSON: keep them off the event loop.
        body = await asyncio.to_thread(answers.whole) if answers.has_logprobs else answers.whole()
        return Response(body, media_type="application/json", headers=headers)
    finally:
        if not is_handed_on:
            watch.cancel()
            answers.close()


class EventStream(Response):
    """A server-sent event stream, from the first delta on."""

    def __init__(
        self, answers: Answers[Any], first: bytes, watch: asyncio.Task[None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answers = answers
        self._first = first
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, events = self._answers, self._first
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while True:
                    if answers.is_done:
                        events += answers.last_events()
                        break
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                    events = answers.read(await answers.pieces())
            except ApiError as error:
                events = answers.unsent + b"data: " + error.encoded() + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": events, "more_body": False})
        except ClientGoneError:
            pass
        finally:
            self._watch.cancel()
            answers.close()


async def _watch(receive: Receive, answers: Answers[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.exchange.client_gone()


def header_text(name: str) -> str:
    """Replace characters of a field name that a header must not have."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:64])
