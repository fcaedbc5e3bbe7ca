"""The running answers of one strategy: none is left open, whatever ends the strategy.

Samples start in the order of their indices, each with an allowance for its tokens. A sample that would get fewer than
it may use waits until others have ended. So which tokens a sample has does not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from craton.ml.serving.clients import Answer, InferenceClient, InferenceRequest
from craton.ml.serving.strategies.limits import Limits
from craton.planning.strategies import estimated_tokens

Result = TypeVar("Result")


class RunningSamples:
    """Starts and awaits answers within limits. A context manager: leaving it aborts what still runs."""

    def __init__(self, client: InferenceClient, limits: Limits) -> None:
        self.client = client
        self.limits = limits
        self.limited_by = ""
        self.num_ended = 0
        self._running: dict[Answer, asyncio.Task[None]] = {}
        self._reserved: dict[Answer, tuple[int, int]] = {}
        self._capped: dict[Answer, str] = {}  # answers whose max_tokens a limit has lowered

    async def __aenter__(self) -> Self:
        self.limits.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._running.values())
        for answer in list(self._running):
            self.abort(answer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def start(self, request: InferenceRequest, copies: int = 1) -> list[Answer]:
        """Start up to so many copies of a request, fewer if the limits have no room for more; none after a limit.

        `generated` tokens count in max_tokens."""
        prompt_tokens = prompt_length(request)
        wanted = request.sampling.max_tokens - len(request.generated)
        count, limit = self._fitting(prompt_tokens, wanted, min(copies, self.client.max_in_flight))
        if count == 0 and self._running:
            return []
        cap = wanted
        if count == 0:
            cap, limit = self.limits.allowance(prompt_tokens, wanted)
            count = 1
        if cap <= 0 or self.limits.seconds_left == 0:
            self.limited_by = self.limited_by or (limit if cap <= 0 else "seconds")
            return []
        sampling = replace(request.sampling, max_tokens=cap + len(request.generated))
        self.limits.reserve(prompt_tokens * count, cap * count)
        answers: list[Answer] = []
        try:
            asked = replace(request, sampling=sampling, copies=count)
            answers = await self.before_deadline(self.client.submit(asked)) or []
        finally:
            if not answers:
                self.limits.spend((prompt_tokens * count, cap * count), 0, 0)
        for answer in answers:
            self._reserved[answer] = (prompt_tokens, cap)
            if cap < wanted:
                self._capped[answer] = limit
            self._running[answer] = asyncio.create_task(_read(answer))
        return answers

    async def wait(self) -> bool:
        """Wait until an answer has ended; False if the time is over or nothing runs. Raise the failure of an answer."""
        if not self._running:
            return False
        done, _ = await asyncio.wait(
            self._running.values(), timeout=self.limits.seconds_left, return_when=asyncio.FIRST_COMPLETED
        )
        for answer in [answer for answer, task in self._running.items() if task in done]:
            self._end(answer)
            if answer.failure is not None:
                raise answer.failure
            if answer.finish == "length" and answer in self._capped:
                self.limited_by = self.limited_by or self._capped[answer]
        if not done:
            self.limited_by = self.limited_by or "seconds"
        return bool(done)

    async def wait_all(self) -> bool:
        """Wait until all answers have ended; False if the time is over before."""
        while self._running:
            if not await self.wait():
                return False
        return True

    def abort(self, answer: Answer) -> None:
        """End an answer that is no longer needed; what it has counts as spent."""
        if answer in self._running:
            self.client.abort(answer)
            self._end(answer)

    def abort_all(self) -> None:
        for answer in list(self._running):
            self.abort(answer)

    async def before_deadline(self, work: Awaitable[Result]) -> Result | None:
        """Return the result of other work of the strategy; None if the time is over before."""
        try:
            async with asyncio.timeout(self.limits.seconds_left) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            self.limited_by = self.limited_by or "seconds"
            return None

    def _fitting(self, prompt_tokens: int, wanted: int, copies: int) -> tuple[int, str]:
        """Return how many copies have room for all their tokens."""
        limit = ""
        for count in range(copies):
            allowed, limit = self.limits.allowance(prompt_tokens * (count + 1), wanted * (count + 1))
            if allowed < wanted * (count + 1):
                return count, limit
        return copies, limit

    def _end(self, answer: Answer) -> None:
        self._running.pop(answer).cancel()
        reserved = self._reserved.pop(answer)
        self.limits.spend(reserved, reserved[0], completion_length(answer))
        self.num_ended += 1


async def _read(answer: Answer) -> None:
    while not answer.is_done:
        await answer.wait()


def completion_length(answer: Answer) -> int:
    """Return the number of tokens that the endpoint has sampled for an answer."""
    return len(answer.sampled_tokens) or answer.num_tokens


def prompt_length(request: InferenceRequest) -> int:
    """Return the tokens of a request's prompt, the continued answer included; estimated for texts."""
    if request.prompt_kind == "token":
        return len(request.prompt) + len(request.generated)
    texts = [request.prompt] if isinstance(request.prompt, str) else [_content(message) for message in request.prompt]
    return sum(map(estimated_tokens, texts)) + len(request.generated)


def _content(message: object) -> str:
    return str(message.get("content", "")) if isinstance(message, dict) else str(message)
