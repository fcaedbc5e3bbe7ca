"""`InferenceClient`: one interface to engines and servers, for rollouts, search, evaluation and routers.

    async with await connect("http://127.0.0.1:8000") as client:
        (answer,) = await client.submit(InferenceRequest("Once upon a time", Sampling(max_tokens=50)))
        async for delta in client.stream(answer):
            print(delta.text, end="")

- At most `max_in_flight` answers are open; `submit` waits for its turn. An answer is open until it ends.
- An answer is aborted when its stream is left early, its reader is cancelled, or the client is closed.
- All methods are for one event loop.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from craton.ml.serving.clients.answer import Answer, AnswerDelta, InferenceRequest
from craton.ml.serving.clients.bounds import Slots, Timeouts
from craton.ml.serving.clients.capabilities import Capabilities, check_capabilities, needs_of
from craton.ml.serving.clients.errors import (
    AnswerTimeoutError,
    ClientClosedError,
    InferenceError,
    RequestRefusedError,
)
from craton.ml.serving.messages import Sampling, seed_of_copy

MAX_IN_FLIGHT = 256
DRAWN_SEEDS = (1 << 53) - 1024  # below: the seed of every copy is a whole number in JSON, too

AnyClient = TypeVar("AnyClient", bound="InferenceClient")


class InferenceClient(ABC):
    """A client of one endpoint. `endpoint` is its name in errors."""

    assumed: frozenset[str] = frozenset()  # capabilities that are not checked: the endpoint refuses a request itself

    def __init__(
        self,
        endpoint: str,
        timeouts: Timeouts | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        random_seed: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeouts = timeouts or Timeouts()
        self.is_closed = False
        self._slots = Slots(max_in_flight)
        self._random = random.Random(random_seed)  # draws seeds and jitter
        self._open: dict[Answer, asyncio.TimerHandle | None] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self: AnyClient) -> AnyClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint}, {self.num_in_flight} in flight)"

    @property
    def num_in_flight(self) -> int:
        return len(self._open)

    @property
    def max_in_flight(self) -> int:
        return self._slots.limit

    async def prompt_tokens(self, request: InferenceRequest) -> tuple[int, ...] | None:
        """Return the token ids of a request's prompt; None if only the endpoint can tokenize it."""
        return tuple(token for token in request.prompt if isinstance(token, int)) or None

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a text, without those that begin or end a prompt; None as above."""
        return None

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Return what the endpoint gives; it is asked once."""

    async def require(self, *names: str) -> None:
        """Raise MissingCapabilityError unless the endpoint has these capabilities."""
        self._expect_open()
        check_capabilities(self.endpoint, await self.capabilities(), set(names))

    async def submit(self, request: InferenceRequest) -> list[Answer]:
        """Wait for free slots and start a request; return an answer for each copy."""
        self._expect_open()
        if request.copies < 1:
            raise RequestRefusedError(f"{self.endpoint}: copies is {request.copies}; it must be 1 or more")
        if needs := needs_of(request) - self.assumed:
            await self.require(*needs)
        request = replace(request, sampling=self._seeded(request.sampling))
        await self._slots.take(request.copies)
        seed = request.sampling.seed
        assert seed is not None
        copies = [
            replace(request, copies=1, sampling=replace(request.sampling, seed=seed_of_copy(seed, index)))
            for index in range(request.copies)
        ]
        answers = [Answer(copy, index) for index, copy in enumerate(copies)]
        await self._start_or_end(answers, lambda: self._start(answers))
        return answers

    async def fork(self, answer: Answer, samplings: Sequence[Sampling]) -> list[Answer]:
        """Start a branch for each sampling, which goes on from the present tokens of a running answer.

        `max_tokens` counts the tokens before the fork, too. Branches do not wait for slots."""
        self._expect_open()
        if answer not in self._open:
            raise self._ended_error()
        if any(sampling.grammar != answer.request.sampling.grammar for sampling in samplings):
            raise RequestRefusedError(f"{self.endpoint}: a branch must have the grammar of the answer that is forked")
        seeded = [self._seeded(sampling) for sampling in samplings]
        branches = [Answer(replace(answer.request, sampling=sampling, generated=())) for sampling in seeded]
        self._slots.take_now(len(branches))
        await self._start_or_end(branches, lambda: self._start_branches(answer, branches))
        return branches

    async def stream(self, answer: Answer) -> AsyncGenerator[AnswerDelta, None]:
        """Yield what comes, until the answer ends. Raise its failure. Leaving early aborts the answer."""
        try:
            while (delta := await answer.next_delta()) is not None:
                yield delta
        finally:
            self.abort(answer)

    def abort(self, answer: Answer) -> None:
        """End an answer, unless it has ended; the endpoint frees its KV cache blocks soon after."""
        if answer in self._open:
            self._abort(answer)
            self._end(answer, AnswerDelta(finish="abort"))

    @abstractmethod
    async def weights_version(self) -> int:
        """Return the version of the endpoint's weights."""

    async def close(self) -> None:
        """Abort all open answers and free the connections."""
        if self.is_closed:
            return
        self.is_closed = True
        self._slots.close()
        for answer in list(self._open):
            self._abort(answer)
            self._fail(answer, ClientClosedError(f"{self.endpoint}: the client was closed"))
        await self._close()
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- for implementations --------------------------------------------------------------------------------------

    @abstractmethod
    async def _start(self, answers: list[Answer]) -> None:
        """Start the copies of one request."""

    @abstractmethod
    async def _start_branches(self, parent: Answer, branches: list[Answer]) -> None: ...

    @abstractmethod
    def _abort(self, answer: Answer) -> None:
        """Make the endpoint end an open answer."""

    @abstractmethod
    async def _close(self) -> None: ...

    def _add(self, answer: Answer, delta: AnswerDelta) -> None:
        """Add what came to an answer."""
        if delta.finish is not None:
            self._end(answer, delta)
            return
        is_first = not answer.has_begun
        answer.add(delta)
        if is_first:
            self._look(answer)

    def _fail(self, answer: Answer, error: InferenceError) -> None:
        answer.fail(error)
        self._forget(answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _end(self, answer: Answer, delta: AnswerDelta) -> None:
        answer.add(delta)
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        if answer in self._open:
            if (timer := self._open.pop(answer)) is not None:
                timer.cancel()
            self._slots.give()

    def _expect_open(self) -> None:
        if self.is_closed:
            raise ClientClosedError(f"{self.endpoint}: the client was closed")

    def _ended_error(self) -> RequestRefusedError:
        return RequestRefusedError(
            f"{self.endpoint}: only running answers can be forked, and this one has ended; submit its continuation()"
        )

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Draw a missing seed here, so that its owner can continue the answer."""
        return sampling if sampling.seed is not None else replace(sampling, seed=self._random.randrange(DRAWN_SEEDS))

    async def _start_or_end(self, answers: list[Answer], start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        self._open.update(dict.fromkeys(answers))
        for answer in answers:
            answer.started_at = loop.time()
            self._look(answer)
        try:
            await start()
        except BaseException:
            for answer in answers:
                self.abort(answer)
            raise

    def _look(self, answer: Answer) -> None:
        """Fail an answer that is too late; otherwise look again when it may be."""
        if answer not in self._open:
            return
        loop = asyncio.get_running_loop()
        if (timer := self._open[answer]) is not None:
            timer.cancel()
        reason, again = self.timeouts.look(answer.started_at, answer.heard_at, loop.time())
        if reason:
            self._abort(answer)
            self._fail(answer, AnswerTimeoutError(f"{self.endpoint}: {reason}"))
        elif again is not None:
            self._open[answer] = loop.call_at(again, self._look, answer)


async def complete(client: InferenceClient, request: InferenceRequest) -> list[Answer]:
    """Return the finished answers to a request. An error of one copy ends the others."""
    return await _finish(client, await client.submit(request))


async def complete_all(client: InferenceClient, requests: Iterable[InferenceRequest]) -> list[list[Answer]]:
    """Return the finished answers to each request, in their order. The requests are read as slots become free, so
    there may be any number. The first error ends all of them."""
    tasks: list[asyncio.Task[list[Answer]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                answers = await client.submit(request)
                tasks.append(group.create_task(_finish(client, answers)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def complete_blocking(
    open_client: Callable[[], InferenceClient], requests: Iterable[InferenceRequest]
) -> list[list[Answer]]:
    """`complete_all` for code without an event loop, such as a training loop: it opens a client and closes it."""

    async def work() -> list[list[Answer]]:
        async with open_client() as client:
            return await complete_all(client, requests)

    return asyncio.run(work())


async def _finish(client: InferenceClient, answers: list[Answer]) -> list[Answer]:
    try:
        for answer in answers:
            async for _ in client.stream(answer):
                pass
    finally:
        for answer in answers:
            client.abort(answer)
    return answers
