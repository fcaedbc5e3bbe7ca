"""The answer of a strategy to one HTTP request: run beside the engine, watched, bounded, and sent in OpenAI's format.

A stream has chunks with a `strategy` object while samples come, which plain clients ignore, and then the answer. A
client that disconnects, the request's timeout or a failed engine end the strategy and free all its samples.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from craton.job.sections.strategy import LOGPROBS, Strategy, VoteStrategy
from craton.ml.serving.clients import (
    EndpointUnavailableError,
    InferenceError,
    InferenceRequest,
    MissingCapabilityError,
    RequestRefusedError,
)
from craton.ml.serving.messages import Sampling
from craton.ml.serving.server.chat import ready_chat
from craton.ml.serving.server.completions import ready_prompts
from craton.ml.serving.server.errors import (
    ApiError,
    BadRequestError,
    BrokenError,
    ClientGoneError,
    UnavailableError,
)
from craton.ml.serving.server.generation import DONE, header_text, to_json
from craton.ml.serving.server.http_service import HttpService
from craton.ml.serving.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from craton.ml.serving.server.strategies.link_client import LinkClient
from craton.ml.serving.server.strategies.offer import StrategyOffer, shown_prompt
from craton.ml.serving.server.tools import ReasoningParser, ToolChoice, make_parser
from craton.ml.serving.strategies import (
    Limits,
    NoScoreError,
    Progress,
    StrategyOutcome,
    StrategyRunError,
    run_strategy,
)
from craton.ml.serving.text import BEGIN

logger = logging.getLogger("craton.serving")

MAX_IN_FLIGHT = 256  # samples of one request at a time


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is written: as a chat or as a completion. `is_inside`: the prompt has opened the thinking.
    `is_continued`: it has the beginning of the answer."""

    is_chat: bool
    has_reasoning: bool = False
    is_inside: bool = False
    is_continued: bool = False

    @property
    def kinds(self) -> tuple[str, str, str]:
        """The prefix of the id, the kind of a whole answer and of a chunk."""
        if self.is_chat:
            return "chatcmpl", "chat.completion", "chat.completion.chunk"
        return "cmpl", "text_completion", "text_completion"

    def parts(self, outcome: StrategyOutcome) -> dict[str, str]:
        """Return the text of an answer, and of its thinking."""
        text = outcome.text
        if outcome.reasoning is not None and self.is_chat:
            reasoning = outcome.reasoning.lstrip().removeprefix(BEGIN).strip("\n")
            return {"reasoning_content": reasoning, "content": text.lstrip("\n")}
        if not self.has_reasoning:
            return {"content": (outcome.reasoning or "") + text}
        parser = ReasoningParser(make_parser("none", {}, ToolChoice("none")), self.is_inside, self.is_continued)
        pieces = [parser.feed(text), parser.finish()]
        reasoning = "".join(piece.reasoning for piece in pieces)
        content = "".join(piece.content for piece in pieces)
        return {**({"reasoning_content": reasoning} if reasoning else {}), "content": content}


async def answer_chat(
    service: HttpService, offer: StrategyOffer, http: Request, request: ChatRequest, strategy: Strategy
) -> Response:
    ignored = request.ignored()
    with service.admitted():
        ready = await ready_chat(service, request)
        form = AnswerForm(True, ready.has_reasoning, ready.is_inside, ready.is_continued)
        run = StrategyRun(service, offer, request, strategy, form)
        run.start(ready.tokens, ready.sampling, ready.adapter)
    return await _respond(http, run, [*ignored, *ready.thinking.ignored])


async def answer_prompt(
    service: HttpService, offer: StrategyOffer, http: Request, request: CompletionRequest, strategy: Strategy
) -> Response:
    ignored = request.ignored()
    with service.admitted():
        adapter = service.adapter(request.model)
        (ready,) = await ready_prompts(service, request)
        run = StrategyRun(service, offer, request, strategy, AnswerForm(False))
        run.start(ready.tokens, ready.sampling, adapter)
    return await _respond(http, run, ignored)


class StrategyRun:
    """A strategy at work on one request. `close` frees everything, whatever its state."""

    def __init__(
        self,
        service: HttpService,
        offer: StrategyOffer,
        request: GenerationRequest,
        strategy: Strategy,
        form: AnswerForm,
    ) -> None:
        self.request = request
        self.form = form
        self.exchange = service.exchange()
        self.client = LinkClient(
            service.link, self.exchange, service.metrics, service.vocabulary, service.template, MAX_IN_FLIGHT
        )
        self._metrics = service.metrics
        self._strategy = strategy
        self._scorer = None
        if strategy.verifier is not None:
            self._scorer = offer.verifiers.scorer(strategy.verifier, service.metrics)
        self._progress: Progress | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[StrategyOutcome] | None = None
        self._seed = 0
        self._envelope = {
            "id": f"{form.kinds[0]}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or service.name,
        }

    def start(self, tokens: tuple[int, ...], sampling: Sampling, adapter: str | None) -> None:
        assert sampling.seed is not None
        self._seed = sampling.seed
        asked = InferenceRequest(
            tokens, sampling, stop=tuple(self.request.stops()), priority=self.request.priority, adapter=adapter
        )
        work = run_strategy(
            self.client,
            asked,
            self._strategy,
            self._scorer,
            Limits(),
            self._note,
            row=self.request.verifier_row or {},
            shown_prompt=shown_prompt(self.request) or "",
        )
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(lambda _: self._changed.set())
        self.client.failure.add_done_callback(lambda _: self._changed.set())

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the newest progress, as often as there is some, until the strategy ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            newest, self._progress = self._progress, None
            if newest is not None:
                yield newest
            if self.client.failure.done() or self._ready_task.done():
                return

    async def outcome(self) -> StrategyOutcome:
        """Wait for the outcome. Raise what ended the request instead."""
        async with aclosing(self.progress()) as progress:
            async for _ in progress:
                pass
        return self.result()

    def result(self) -> StrategyOutcome:
        """Return the outcome after the end. Raise what ended the request instead."""
        if self.client.failure.done():
            raise self.client.failure.result()
        try:
            outcome = self._ready_task.result()
        except (RequestRefusedError, MissingCapabilityError) as error:
            raise BadRequestError(f"strategy: {error}", "strategy", "engine_refused") from None
        except EndpointUnavailableError as error:
            raise UnavailableError(str(error), code="engine_failed") from None
        except NoScoreError as error:
            # Reasons hold what verifiers raise and where judges are: they are for the log alone.
            logger.warning("strategy %s: %s", self._strategy.kind, error)
            raise BrokenError(
                f"no sample got a score from {self._strategy.verifier or LOGPROBS!r}; the server's log has the reasons",
                code="no_score",
            ) from None
        except StrategyRunError as error:
            raise BadRequestError(str(error), str(error).partition(":")[0], "invalid_strategy") from None
        except InferenceError as error:
            raise BrokenError(str(error), code="strategy_failed") from None
        self._count(outcome)
        return outcome

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._task
        await self.client.close()

    # -- what the client gets -------------------------------------------------------------------------------------

    def progress_event(self, progress: Progress) -> str:
        """Return a chunk without text that says how far the strategy is."""
        return self._event([self._choice({})], {"strategy": asdict(progress)})

    def last_events(self, outcome: StrategyOutcome) -> str:
        parts = self.form.parts(outcome)
        events = []
        if self.form.is_chat:
            events.append(self._event([{**self._choice({"role": "assistant", "content": ""}), "seed": self._seed}]))
            events += [self._event([self._choice({name: text})]) for name, text in parts.items() if text]
            last = self._choice({})
        else:
            last = self._choice(parts)
        last |= {"finish_reason": outcome.finish or "stop", "stop_reason": None, **self._tokens(outcome)}
        events.append(self._event([last], {"strategy": self._report(outcome)}))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            events.append(self._event([], {"usage": self._usage(outcome)}))
        return "".join(events) + DONE.decode()

    def whole(self, outcome: StrategyOutcome) -> bytes:
        parts = self.form.parts(outcome)
        choice: dict[str, Any] = {"index": 0}
        if self.form.is_chat:
            choice["message"] = {"role": "assistant", "refusal": None, **parts}
        else:
            choice["text"] = parts["content"]
        choice |= {"logprobs": None, "finish_reason": outcome.finish or "stop", "stop_reason": None, "seed": self._seed}
        choice |= self._tokens(outcome)
        body = {**self._envelope, "object": self.form.kinds[1], "choices": [choice], "usage": self._usage(outcome)}
        return to_json({**body, "strategy": self._report(outcome)}).encode()

    def _choice(self, parts: dict[str, str]) -> dict[str, Any]:
        text = {"delta": parts} if self.form.is_chat else {"text": parts.get("content", "")}
        return {"index": 0, **text, "logprobs": None, "finish_reason": None}

    def _event(self, choices: Sequence[dict[str, Any]], extra: dict[str, Any] | None = None) -> str:
        chunk = {**self._envelope, "object": self.form.kinds[2], "choices": list(choices), **(extra or {})}
        return f"data: {to_json(chunk)}\n\n"

    def _report(self, outcome: StrategyOutcome) -> dict[str, Any]:
        limited = {"limited_by": outcome.limited_by} if outcome.limited_by else {}
        return {**outcome.report, "samples": outcome.usage.num_samples, **limited}

    def _tokens(self, outcome: StrategyOutcome) -> dict[str, Any]:
        return {"token_ids": list(outcome.tokens)} if self.request.return_token_ids else {}

    def _usage(self, outcome: StrategyOutcome) -> dict[str, Any]:
        usage = outcome.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens_details": {
                "chosen_tokens": usage.chosen_tokens,
                "discarded_tokens": usage.discarded_tokens,
                "samples": usage.num_samples,
            },
        }

    def _note(self, progress: Progress) -> None:
        self._progress = progress
        self._changed.set()

    def _count(self, outcome: StrategyOutcome) -> None:
        usage, strategy = outcome.usage, self._strategy
        is_early = isinstance(strategy, VoteStrategy) and not outcome.limited_by and usage.num_samples < strategy.n
        self._metrics.strategy_ended(
            strategy.kind,
            usage.num_samples,
            usage.chosen_tokens,
            usage.discarded_tokens,
            outcome.limited_by,
            is_early,
        )

    @property
    def _ready_task(self) -> asyncio.Task[StrategyOutcome]:
        assert self._task is not None
        return self._task


async def _respond(http: Request, run: StrategyRun, ignored: list[str]) -> Response:
    """Return the answer as a body, or as a stream once there is progress: an error before that has its HTTP status."""
    headers = {"X-Ignored-Fields": ", ".join(map(header_text, ignored[:20]))} if ignored else {}
    watch = asyncio.create_task(_watch(http.receive, run))
    is_handed_on = False
    try:
        if not run.request.stream:
            return Response(run.whole(await run.outcome()), media_type="application/json", headers=headers)
        progress = run.progress()
        first = await anext(progress, None)
        events = run.last_events(run.result()) if first is None else run.progress_event(first)
        is_handed_on = True
        return StrategyStream(run, events, progress if first is not None else None, watch, headers)
    finally:
        if not is_handed_on:
            watch.cancel()
            await run.close()


class StrategyStream(Response):
    """A server-sent event stream: the progress of a strategy, then its answer. `progress` None: `first` is all."""

    def __init__(
        self,
        run: StrategyRun,
        first: str,
        progress: AsyncIterator[Progress] | None,
        watch: asyncio.Task[None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._first = first
        self._progress = progress
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, events = self._run, self._first
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._progress is not None:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
                try:
                    async for progress in self._progress:
                        event = run.progress_event(progress).encode()
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                    events = run.last_events(run.result())
                except ApiError as error:
                    events = f"data: {error.encoded().decode()}\n\n{DONE.decode()}"
            await send({"type": "http.response.body", "body": events.encode(), "more_body": False})
        except ClientGoneError:
            pass
        finally:
            self._watch.cancel()
            await run.close()


async def _watch(receive: Receive, run: StrategyRun) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    run.exchange.client_gone()
