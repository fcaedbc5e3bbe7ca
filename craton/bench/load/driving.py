"""Sends the requests of one load when they are due, and records a sample of each.

Everything runs on one thread and one event loop. The client's CPU share is measured (`busy`), and the report warns if
the client, not the server, may be the bottleneck.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from craton.bench.load.answer import StreamedResponse
from craton.bench.load.endpoint import Endpoint
from craton.bench.load.load import Closed, Limit, Open, Timed
from craton.bench.load.requests import Request
from craton.bench.load.samples import RequestSample

Progress = Callable[[int, int, str], None]

_PROGRESS_SECONDS = 0.2
_RATE_SECONDS = 2.0  # window of the progress bar's tokens/s


@dataclass(frozen=True)
class Driven:
    """The samples of a load, and the share of one core that the client used."""

    samples: tuple[RequestSample, ...]
    busy: float


async def drive(
    endpoint: Endpoint,
    requests: Iterator[Request],
    load: Closed | Open | Timed,
    limit: Limit,
    progress: Progress,
    seed: int = 0,
    stream: int = 0,
) -> Driven:
    """Send requests until the limit or their end, and wait for all answers."""
    work = _Work(endpoint, perf_counter(), limit.seconds)
    cpu = time.thread_time()
    due_requests = work.limited(requests, limit.requests)
    async with _reporting(work, limit, progress), asyncio.TaskGroup() as group:
        if isinstance(load, Closed):
            for _ in range(load.concurrency):
                group.create_task(work.send_one_after_another(due_requests))
        else:
            times = load.times(seed, stream) if isinstance(load, Open) else None
            group.create_task(work.send_in_time(due_requests, times, group))
    wall = perf_counter() - work.start
    return Driven(tuple(work.samples), (time.thread_time() - cpu) / wall)


class _Work:
    """A running load."""

    def __init__(self, endpoint: Endpoint, start: float, seconds: float | None) -> None:
        self.endpoint, self.start = endpoint, start
        self.deadline = float("inf") if seconds is None else start + seconds
        self.samples: list[RequestSample] = []
        self.running: set[StreamedResponse] = set()
        self.ended_chunks = 0
        self.ended_tokens = 0

    def limited(self, requests: Iterator[Request], maximum: int | None) -> Iterator[Request]:
        for number, request in enumerate(requests):
            if number == maximum or perf_counter() >= self.deadline:
                return
            yield request

    async def send_one_after_another(self, requests: Iterator[Request]) -> None:
        for request in requests:
            body = self.endpoint.encode(request)
            await self.send(request, body, perf_counter())

    async def send_in_time(
        self, requests: Iterator[Request], times: Iterator[float] | None, group: asyncio.TaskGroup
    ) -> None:
        for request in requests:
            due = self.start + (request.at_seconds or 0.0 if times is None else next(times))
            if due >= self.deadline:
                return
            body = self.endpoint.encode(request)  # before it is due, so that it is sent on time
            # Sleep also if late: it lets the event loop read answers, so that their times stay accurate.
            await asyncio.sleep(max(0.0, due - perf_counter()))
            group.create_task(self.send(request, body, due))

    async def send(self, request: Request, body: bytes, due: float) -> None:
        answer = StreamedResponse()
        self.running.add(answer)
        sent = perf_counter()
        await self.endpoint.stream(body, answer)
        ended = perf_counter()
        self.running.discard(answer)
        sample = _sample(request, answer, self.start, due, sent, ended)
        self.ended_chunks += len(answer.chunk_times)
        self.ended_tokens += sample.output_tokens
        self.samples.append(sample)

    def chunks(self) -> int:
        return self.ended_chunks + sum(len(answer.chunk_times) for answer in self.running)

    def tokens_per_chunk(self) -> float:
        return self.ended_tokens / self.ended_chunks if self.ended_chunks else 1.0


def _sample(
    request: Request, answer: StreamedResponse, start: float, due: float, sent: float, ended: float
) -> RequestSample:
    prompt_tokens = answer.prompt_tokens
    if prompt_tokens is None and not isinstance(request.prompt, str):
        prompt_tokens = len(request.prompt)
    has_usage = answer.output_tokens is not None
    return RequestSample(
        due_seconds=due - start,
        sent_seconds=sent - start,
        end_seconds=(ended if answer.error or answer.end_time is None else answer.end_time) - start,
        chunk_seconds=np.array(answer.chunk_times) - start,
        prompt_tokens=prompt_tokens,
        output_tokens=len(answer.chunk_times) if answer.output_tokens is None else answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        has_usage=has_usage,
        error=answer.error,
        error_detail=answer.error_detail,
    )


@contextlib.asynccontextmanager
async def _reporting(work: _Work, limit: Limit, progress: Progress) -> AsyncIterator[None]:
    async def report() -> None:
        samples: list[tuple[float, int]] = []
        while True:
            now = perf_counter()
            samples = [(at, chunks) for at, chunks in samples if at > now - _RATE_SECONDS] + [(now, work.chunks())]
            seconds, chunks = now - samples[0][0], samples[-1][1] - samples[0][1]
            rate = work.tokens_per_chunk() * chunks / seconds if seconds > 0 else 0.0
            words = f"{rate:,.0f} tokens/s, {len(work.running)} running"
            if limit.requests is not None:
                progress(len(work.samples), limit.requests, words)
            else:
                total = round(limit.seconds or 0)
                progress(min(int(now - work.start), total), total, words)
            await asyncio.sleep(_PROGRESS_SECONDS)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
