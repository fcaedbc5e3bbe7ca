"""Generation beside training: a thread with an event loop that completes groups, and what the trainer asks of it.

The trainer's thread calls the public methods. Each runs on the event loop, between two awaits of everything else, so
what it returns is consistent. An error of the thread is raised by the next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from craton.ml.posttraining.asynchronous.completing import Completions
from craton.ml.posttraining.asynchronous.endpoints import Endpoints
from craton.ml.posttraining.asynchronous.groups import RolloutGroup
from craton.ml.posttraining.asynchronous.selection import GroupState

CLOSE_SECONDS = 30.0
LOOK_SECONDS = 0.1  # between two checks whether the generation is over

Result = TypeVar("Result")
Check = Callable[[], None]


class RolloutProducer:
    """`open_completions` runs on the event loop; what it opens is closed there, by `Endpoints.close`."""

    def __init__(self, open_completions: Callable[[], Awaitable[Completions]]) -> None:
        self._open_completions = open_completions
        self._completions: Completions | None = None
        self._groups: dict[int, RolloutGroup] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._opened, self._stopped = asyncio.Event(), asyncio.Event()
        self._changed = threading.Event()
        self._idle_since: float | None = time.monotonic()
        self._idle_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="craton-rollouts", daemon=True)
        self._thread.start()

    def begin(self, groups: Iterable[RolloutGroup], check: Check) -> None:
        """Generate what these groups lack."""
        wanted = list(groups)

        async def start() -> None:
            for group in wanted:
                assert group.index not in self._groups, f"{group.index} has begun"
                self._groups[group.index] = group
                if not group.is_finished:
                    self._tasks[group.index] = asyncio.get_running_loop().create_task(self._finish(group))
            self._note_idle()

        self.call(start, check)

    def states(self, check: Check) -> list[GroupState]:
        async def look() -> list[GroupState]:
            self._changed.clear()
            return [group.state for group in self._groups.values()]

        return self.call(look, check)

    def wait(self, seconds: float) -> None:
        """Wait until a group has finished since the last `states`, or something failed."""
        self._changed.wait(seconds)

    def take(self, indices: Sequence[int], check: Check) -> list[RolloutGroup]:
        """Return finished groups, which are then no longer ours."""

        async def give() -> list[RolloutGroup]:
            assert all(self._groups[index].is_finished for index in indices)
            return [self._groups.pop(index) for index in indices]

        return self.call(give, check)

    def pending(self, check: Check) -> list[RolloutGroup]:
        """Return copies of all groups, with what has come of unfinished ones."""

        async def copy() -> list[RolloutGroup]:
            assert self._completions is not None
            return [self._completions.snapshot(group) for group in self._groups.values()]

        return self.call(copy, check)

    def finished(self, check: Check) -> list[RolloutGroup]:
        """Return the groups that have finished; they are still ours."""

        async def look() -> list[RolloutGroup]:
            return [group for group in self._groups.values() if group.is_finished]

        return self.call(look, check)

    def complete(
        self, groups: Sequence[RolloutGroup], open_completions: Callable[[Endpoints], Completions], check: Check
    ) -> None:
        """Complete other groups, and wait for them."""

        async def work() -> None:
            assert self._completions is not None
            completions = open_completions(self._completions.endpoints)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        tasks.create_task(completions.finish(group))
            except BaseExceptionGroup as errors:
                raise _first(errors) from None

        self.call(work, check)

    def waits_for(self, check: Check) -> str:
        """Return what unfinished groups wait for: rollout, or only reward."""

        async def look() -> str:
            assert self._completions is not None
            is_generating = any(endpoint.in_flight for endpoint in self._completions.endpoints.endpoints)
            return "reward" if self._completions.verifying and not is_generating else "rollout"

        return self.call(look, check)

    def numbers(self, check: Check) -> tuple[int, float]:
        """Return the tokens generated so far, and the seconds in which there was nothing to generate."""

        async def look() -> tuple[int, float]:
            assert self._completions is not None
            idle = self._idle_seconds
            if self._idle_since is not None:
                idle += time.monotonic() - self._idle_since
            return self._completions.num_tokens, idle

        return self.call(look, check)

    def call(self, work: Callable[[], Awaitable[Result]], check: Check) -> Result:
        """Run work on the event loop and return its result. `check` is called while it runs, and may raise."""
        if self._failure is not None:
            raise self._failure
        future = asyncio.run_coroutine_threadsafe(self._after_opening(work), self._loop)
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if self._failure is not None:
                    future.cancel()
                    raise self._failure from None
                try:
                    check()
                except BaseException:
                    future.cancel()
                    raise

    def close(self) -> None:
        """Abort all requests and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CLOSE_SECONDS)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._fail(error)
        finally:
            self._loop.close()

    async def _main(self) -> None:
        try:
            self._completions = await self._open_completions()
            self._opened.set()
            await self._stopped.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if self._completions is not None:
                await self._completions.endpoints.close()

    def _stop(self) -> None:
        self._stopped.set()
        if not self._opened.is_set():
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

    async def _after_opening(self, work: Callable[[], Awaitable[Result]]) -> Result:
        await self._opened.wait()
        return await work()

    async def _finish(self, group: RolloutGroup) -> None:
        assert self._completions is not None
        try:
            await self._completions.finish(group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._fail(_first(error))
        finally:
            del self._tasks[group.index]
            self._note_idle()
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _note_idle(self) -> None:
        """Keep the time in which no group is being generated."""
        now = time.monotonic()
        if self._tasks and self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = None
        elif not self._tasks and self._idle_since is None:
            self._idle_since = now


def _first(error: BaseException) -> BaseException:
    """Return the first of the errors of a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
