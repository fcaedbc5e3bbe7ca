"""A client of an engine in this process: one thread calls it, so the event loop never waits for a step.

A trainer that shares the GPU with the engine trains while no answer is open: then there are no steps. It changes the
engine itself, for example the version of its weights, by `between_steps`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from craton.ml.serving.clients.answer import Answer, AnswerDelta
from craton.ml.serving.clients.bounds import Timeouts
from craton.ml.serving.clients.capabilities import Capabilities
from craton.ml.serving.clients.client import MAX_IN_FLIGHT, InferenceClient
from craton.ml.serving.clients.engine_texts import ENDPOINT, EngineTexts, answer_delta
from craton.ml.serving.clients.errors import EndpointUnavailableError, InferenceError, RequestRefusedError
from craton.ml.serving.messages import Abort, Fork, ForkBranch, OutputDelta, Submit
from craton.ml.serving.server.text import AnswerReader

STILL_SECONDS = 0.002  # pause when there is nothing to compute: grammars compile, or the engine is paused

request_numbers = count(1)  # of all clients: deltas of one that was closed must not reach another

Result = TypeVar("Result")


class DrivenEngine(Protocol):
    """What a client needs of an engine. (The type itself would import torch.)"""

    version: int
    adapters: dict[str, int]

    @property
    def state(self) -> str: ...
    @property
    def is_still(self) -> bool: ...
    @property
    def has_grammars(self) -> bool: ...
    def submit(self, request: Submit) -> None: ...
    def start_branches(self, request: Fork) -> None: ...
    def abort(self, request: Abort) -> None: ...
    def step(self) -> list[OutputDelta]: ...
    def take_ended(self) -> list[OutputDelta]: ...
    def finish_in_flight(self) -> list[OutputDelta]: ...


class EngineClient(InferenceClient):
    """Text prompts, chats, text of answers and stop strings need the model's tokenizer folder."""

    def __init__(
        self,
        engine: DrivenEngine,
        tokenizer_folder: Path | None = None,
        timeouts: Timeouts | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        random_seed: int | None = None,
    ) -> None:
        super().__init__(ENDPOINT, timeouts, max_in_flight, random_seed)
        self._engine = engine
        self._texts = EngineTexts(tokenizer_folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._numbers: dict[Answer, tuple[int, int]] = {}  # engine's request and copy
        self._answers: dict[tuple[int, int], Answer] = {}
        self._readers: dict[Answer, AnswerReader] = {}
        self._prompts: dict[Answer, tuple[int, ...]] = {}
        self._driver: asyncio.Task[None] | None = None

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
            grammars=self._engine.has_grammars,
            adapters=True,
            continued_requests=True,
            shared_forks=True,
            weights_versions=True,
        )

    async def weights_version(self) -> int:
        return self._engine.version

    async def between_steps(self, action: Callable[[], list[OutputDelta]]) -> None:
        """Call a function on the engine's thread, between two steps. Deltas that it returns go to their answers:

        await client.between_steps(engine.change_version)"""
        self._expect_open()
        self._dispatch(await self._call(action))

    async def _start(self, answers: list[Answer]) -> None:
        request = answers[0].request
        prompt = await self._call(lambda: self._texts.tokens(request))
        self._expect_open()
        number = next(request_numbers)
        sampling, generated = request.sampling, request.generated
        for answer in answers:
            self._open_answer(answer, number, answer.index, prompt)
            if generated and answer in self._readers:
                reader = self._readers[answer]
                reader.replay(generated)
                if reader.is_stopped:
                    self._add(answer, AnswerDelta(finish="stop"))
        if all(answer.is_done for answer in answers):
            return
        submit = Submit(number, prompt, sampling, len(answers), request.priority, request.adapter, generated)
        submitted = self._call(lambda: self._engine.submit(submit))
        for answer in answers:
            if answer not in self._open:  # it was aborted while its prompt was tokenized
                self._abort(answer)
                self._forget(answer)
        await submitted
        self._drive()

    async def _start_branches(self, parent: Answer, branches: list[Answer]) -> None:
        number, copy = self._numbers[parent]
        prompt = self._prompts[parent]
        started = []
        for branch in branches:
            branch_number = next(request_numbers)
            self._open_answer(branch, branch_number, 0, prompt)
            started.append(ForkBranch(branch_number, branch.request.sampling))
        fork = Fork(number, tuple(started), copy)
        await self._call(lambda: self._engine.start_branches(fork))
        self._drive()

    def _abort(self, answer: Answer) -> None:
        if (key := self._numbers.get(answer)) is not None:
            self._thread.submit(self._engine.abort, Abort(*key))

    async def _close(self) -> None:
        if self._driver is not None:
            await self._driver
        await self._call(self._settle)
        self._thread.shutdown()

    def _forget(self, answer: Answer) -> None:
        super()._forget(answer)
        if (key := self._numbers.pop(answer, None)) is not None:
            del self._answers[key]
            self._readers.pop(answer, None)
            del self._prompts[answer]

    def _open_answer(self, answer: Answer, number: int, copy: int, prompt: tuple[int, ...]) -> None:
        self._numbers[answer] = (number, copy)
        self._answers[number, copy] = answer
        self._prompts[answer] = prompt
        if (reader := self._texts.reader(answer.request, prompt)) is not None:
            self._readers[answer] = reader

    def _call(self, action: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run an action on the engine's thread, after those before it."""
        return asyncio.get_running_loop().run_in_executor(self._thread, action)

    def _drive(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Run steps while answers are open."""
        try:
            while self._answers:
                while self._answers:
                    self._dispatch(await self._call(self._step))
                self._dispatch(await self._call(self._settle))  # meanwhile others may have been submitted
        except Exception as error:  # noqa: BLE001 -- whatever the engine raises, its requests must hear of it
            failure = EndpointUnavailableError(f"{self.endpoint} failed: {type(error).__name__}: {error}")
            for answer in list(self._answers.values()):
                self._fail(answer, failure)

    def _step(self) -> list[OutputDelta]:
        if self._engine.is_still or self._engine.state != "running":
            time.sleep(STILL_SECONDS)
        return self._engine.step()

    def _settle(self) -> list[OutputDelta]:
        """Read what belongs to answers that have ended, so that nothing is left in the engine."""
        return self._engine.finish_in_flight() + self._engine.take_ended()

    def _dispatch(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            answer = self._answers.get((delta.id, delta.index))
            if answer is not None:
                self._take(answer, delta)

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
