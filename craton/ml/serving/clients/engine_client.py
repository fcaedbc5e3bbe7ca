"""A client of an engine in this process: one thread calls it, so the event loop never waits for a step.

A trainer that shares the GPU with the engine trains while no answer is open: then there are no steps. It changes the
engine itself, for example the version of its weights, by `between_steps`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from craton.ml.serving.clients.answer import InferenceRequest
from craton.ml.serving.clients.bounds import Timeouts
from craton.ml.serving.clients.client import MAX_IN_FLIGHT
from craton.ml.serving.clients.engine_texts import ENDPOINT, EngineTexts
from craton.ml.serving.clients.errors import EndpointUnavailableError
from craton.ml.serving.clients.token_client import Sent, TokenClient
from craton.ml.serving.messages import Abort, Fork, ForkBranch, OutputDelta, Sampling, Submit

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


class EngineClient(TokenClient):
    """Text prompts, chats, text of answers and stop strings need the model's tokenizer folder."""

    def __init__(
        self,
        engine: DrivenEngine,
        tokenizer_folder: Path | None = None,
        timeouts: Timeouts | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        random_seed: int | None = None,
    ) -> None:
        super().__init__(ENDPOINT, EngineTexts.of_folder(tokenizer_folder), timeouts, max_in_flight, random_seed)
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._driver: asyncio.Task[None] | None = None

    @property
    def has_grammars(self) -> bool:
        return self._engine.has_grammars

    async def weights_version(self) -> int:
        return self._engine.version

    async def between_steps(self, action: Callable[[], list[OutputDelta]]) -> None:
        """Call a function on the engine's thread, between two steps. Deltas that it returns go to their answers:

        await client.between_steps(engine.change_version)"""
        self._expect_open()
        self._dispatch(await self._call(action))

    def _send(self, prompt: tuple[int, ...], request: InferenceRequest, copies: int) -> tuple[int, Sent]:
        number = next(request_numbers)
        submit = Submit(number, prompt, request.sampling, copies, request.priority, request.adapter, request.generated)
        return number, self._then_drive(self._call(lambda: self._engine.submit(submit)))

    def _send_fork(self, number: int, copy: int, samplings: Sequence[Sampling]) -> tuple[list[int], Sent]:
        branches = tuple(ForkBranch(next(request_numbers), sampling) for sampling in samplings)
        fork = Fork(number, branches, copy)
        sent = self._then_drive(self._call(lambda: self._engine.start_branches(fork)))
        return [branch.id for branch in branches], sent

    def _end_copy(self, number: int, copy: int) -> None:
        self._thread.submit(self._engine.abort, Abort(number, copy))

    async def _close(self) -> None:
        if self._driver is not None:
            await self._driver
        await self._call(self._settle)
        self._thread.shutdown()

    def _aside(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return self._call(work)

    def _call(self, action: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run an action on the engine's thread, after those before it."""
        return asyncio.get_running_loop().run_in_executor(self._thread, action)

    async def _then_drive(self, submitted: asyncio.Future[None]) -> None:
        await submitted
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
            self._fail_open(EndpointUnavailableError(f"{self.endpoint} failed: {type(error).__name__}: {error}"))

    def _step(self) -> list[OutputDelta]:
        if self._engine.is_still or self._engine.state != "running":
            time.sleep(STILL_SECONDS)
        return self._engine.step()

    def _settle(self) -> list[OutputDelta]:
        """Read what belongs to answers that have ended, so that nothing is left in the engine."""
        return self._engine.finish_in_flight() + self._engine.take_ended()
