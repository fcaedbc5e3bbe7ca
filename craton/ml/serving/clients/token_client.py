"""What the clients of an engine's own messages share: tokens go out, output deltas come in and become text here.

A prompt is tokenized once for all copies of a request. A stop string ends an answer, and the engine's request with it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from craton.ml.serving.clients.answer import Answer, AnswerDelta, InferenceRequest
from craton.ml.serving.clients.bounds import Timeouts
from craton.ml.serving.clients.capabilities import Capabilities
from craton.ml.serving.clients.client import MAX_IN_FLIGHT, InferenceClient
from craton.ml.serving.clients.engine_texts import EngineTexts, answer_delta
from craton.ml.serving.clients.errors import EndpointUnavailableError, InferenceError, RequestRefusedError
from craton.ml.serving.messages import OutputDelta, Sampling
from craton.ml.serving.text import AnswerReader

Sent = Awaitable[None] | None
Result = TypeVar("Result")


class TokenClient(InferenceClient):
    """Text prompts, chats, text of answers and stop strings need a tokenizer."""

    def __init__(
        self,
        endpoint: str,
        texts: EngineTexts,
        timeouts: Timeouts | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        random_seed: int | None = None,
    ) -> None:
        super().__init__(endpoint, timeouts, max_in_flight, random_seed)
        self._texts = texts
        self._numbers: dict[Answer, tuple[int, int]] = {}  # engine's request and copy
        self._answers: dict[tuple[int, int], Answer] = {}
        self._readers: dict[Answer, AnswerReader] = {}
        self._prompts: dict[Answer, tuple[int, ...]] = {}

    @property
    @abstractmethod
    def has_grammars(self) -> bool:
        """Whether the engine compiles grammars."""

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            text_prompts=self._texts.has_texts,
            chat_prompts=self._texts.has_chats,
            token_prompts=True,
            token_ids=True,
            logprobs=True,
            sampled_logprobs=True,
            alternatives=True,
            prompt_logprobs=True,
            seeds=True,
            stop_strings=self._texts.has_texts,
            extended_sampling=True,
            grammars=self.has_grammars,
            adapters=True,
            continued_requests=True,
            continued_chats=self._texts.has_chats,
            continued_whitespace=self._texts.has_chats,
            shared_forks=True,
            weights_versions=True,
        )

    async def prompt_tokens(self, request: InferenceRequest) -> tuple[int, ...] | None:
        """Return the tokens of a request's prompt."""
        self._expect_open()
        return await self._aside(lambda: self._texts.tokens(request))

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text alone; None without a tokenizer."""
        self._expect_open()
        return await self._aside(lambda: self._texts.encode(text))

    # -- for implementations --------------------------------------------------------------------------------------

    @abstractmethod
    def _aside(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Do what may take long without blocking the event loop."""

    @abstractmethod
    def _send(self, prompt: tuple[int, ...], request: InferenceRequest, copies: int) -> tuple[int, Sent]:
        """Send a request; return the engine's number for it, and what to wait for once its answers are known."""

    @abstractmethod
    def _send_fork(self, number: int, copy: int, samplings: Sequence[Sampling]) -> tuple[list[int], Sent]:
        """Fork a copy; return the engine's number for each branch, and what to wait for."""

    @abstractmethod
    def _end_copy(self, number: int, copy: int) -> None:
        """Make the engine end a copy."""

    async def _start(self, answers: list[Answer]) -> None:
        request = answers[0].request
        prompt = await self._aside(lambda: self._texts.tokens(request))
        self._expect_open()
        readers = [self._texts.reader(answer.request, prompt) for answer in answers]
        for answer, reader in zip(answers, readers, strict=True):
            if reader is None or not request.generated:
                continue
            reader.replay(request.generated)
            if reader.is_stopped:
                self._add(answer, AnswerDelta(finish="stop"))
        if all(answer.is_done for answer in answers):
            return
        number, sent = self._send(prompt, request, len(answers))
        for answer, reader in zip(answers, readers, strict=True):
            self._know(answer, (number, answer.index), prompt, reader)
            if answer not in self._open:  # it was aborted while its prompt was tokenized, or has stopped
                self._abort(answer)
                self._forget(answer)
        if sent is not None:
            await sent

    async def _start_branches(self, parent: Answer, branches: list[Answer]) -> None:
        number, copy = self._numbers[parent]
        prompt = self._prompts[parent]
        numbers, sent = self._send_fork(number, copy, [branch.request.sampling for branch in branches])
        for branch, branch_number in zip(branches, numbers, strict=True):
            self._know(branch, (branch_number, 0), prompt, self._texts.reader(branch.request, prompt))
        if sent is not None:
            await sent

    def _abort(self, answer: Answer) -> None:
        if (key := self._numbers.get(answer)) is not None:
            self._end_copy(*key)

    def _forget(self, answer: Answer) -> None:
        super()._forget(answer)
        if (key := self._numbers.pop(answer, None)) is not None:
            del self._answers[key]
            self._readers.pop(answer, None)
            del self._prompts[answer]

    def _fail_open(self, error: InferenceError) -> None:
        """Fail all answers that the engine has."""
        for answer in list(self._answers.values()):
            self._fail(answer, error)

    def _dispatch(self, deltas: Iterable[OutputDelta]) -> None:
        for delta in deltas:
            answer = self._answers.get((delta.id, delta.index))
            if answer is not None:
                self._take(answer, delta)

    def _know(self, answer: Answer, key: tuple[int, int], prompt: tuple[int, ...], reader: AnswerReader | None) -> None:
        self._numbers[answer] = key
        self._answers[key] = answer
        self._prompts[answer] = prompt
        answer.prompt_tokens = len(prompt)
        if reader is not None:
            self._readers[answer] = reader

    def _take(self, answer: Answer, delta: OutputDelta) -> None:
        if delta.finish == "error":
            kind: type[InferenceError] = EndpointUnavailableError if delta.is_ours else RequestRefusedError
            self._fail(answer, kind(f"{self.endpoint}: {delta.error}"))
            return
        if delta.generated:
            answer.generated = tuple(delta.generated)
        answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        reader = self._readers.get(answer)
        if reader is not None and delta.generated:
            reader.replay(delta.generated)
            if reader.is_stopped:  # before the parent could be aborted
                self.abort(answer)
                return
        added = answer_delta(delta, reader)
        if added.finish is not None and delta.finish is None:
            self._abort(answer)
        self._add(answer, added)
