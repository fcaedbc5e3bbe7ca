"""A client over the front end's connection: everything that a client of an engine gives, and it ends with its request.

The engine is a real one on a thread; what the exchange's end does is seen in its number of open requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from threaded_engine import MAX_LENGTH, ThreadedEngine
from waiting import PATIENCE_SECONDS, wait_until

from craton.ml.serving.clients import (
    AnswerTimeoutError,
    ClientClosedError,
    EndpointUnavailableError,
    InferenceError,
    InferenceRequest,
    complete,
)
from craton.ml.serving.messages import Sampling
from craton.ml.serving.server.errors import UnavailableError
from craton.ml.serving.server.link import EngineLink, Exchange
from craton.ml.serving.server.metrics import Metrics
from craton.ml.serving.server.strategies import LinkClient
from craton.ml.serving.server.wire import Wire
from craton.ml.serving.text import Vocabulary, load_template

PROMPT = (5, 17, 2, 80, 33)
LONG = Sampling(max_tokens=MAX_LENGTH - len(PROMPT), seed=3, ignore_eos=True)
SHORT = replace(LONG, max_tokens=8)

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    engine = ThreadedEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def run(engine: ThreadedEngine) -> Iterator[Callable[[Callable[[EngineLink], Awaitable[object]]], object]]:
    """Run a coroutine over the connection, in one event loop for all tests."""
    loop = asyncio.new_event_loop()
    link = EngineLink(Wire(engine.far_end))

    async def begin() -> None:
        link.start()
        while link.ready is None:
            await asyncio.sleep(0.01)

    loop.run_until_complete(asyncio.wait_for(begin(), PATIENCE_SECONDS))
    yield lambda work: loop.run_until_complete(asyncio.wait_for(work(link), PATIENCE_SECONDS))  # type: ignore[arg-type]

    async def end() -> None:
        link.close()

    loop.run_until_complete(end())
    loop.close()


def client_of(link: EngineLink, folder: Path | None = None, seconds: float = 0.0) -> tuple[LinkClient, Exchange]:
    exchange = Exchange(link, seconds)
    vocabulary = None if folder is None else Vocabulary(folder)
    template = None if folder is None else load_template(folder)
    return LinkClient(link, exchange, Metrics(link, "small"), vocabulary, template, 8), exchange


def test_copies_continue_and_fork_as_with_an_engine(run: Callable[..., object], engine: ThreadedEngine) -> None:
    async def work(link: EngineLink) -> None:
        client, _ = client_of(link)
        async with client:
            whole = await complete(client, InferenceRequest(PROMPT, SHORT, copies=3))
            alone = [await complete(client, InferenceRequest(PROMPT, replace(SHORT, seed=3 + copy))) for copy in (0, 2)]
            assert [whole[0].tokens, whole[2].tokens] == [alone[0][0].tokens, alone[1][0].tokens]
            begun = InferenceRequest(PROMPT, SHORT, generated=tuple(whole[1].tokens[:5]))
            (rest,) = await complete(client, replace(begun, sampling=replace(SHORT, seed=4)))
            assert rest.tokens == whole[1].tokens[5:]
            (parent,) = await client.submit(InferenceRequest(PROMPT, LONG))
            stream = client.stream(parent)
            await anext(stream)
            (branch,) = await client.fork(parent, [replace(LONG, max_tokens=40)])
            async for _ in client.stream(branch):
                pass
            assert len(branch.generated) + len(branch.tokens) == 40
            assert list(branch.generated) == parent.tokens[: len(branch.generated)]
            await stream.aclose()
        await nothing_is_left(engine)
        assert not link.exchanges

    run(work)


def test_texts_chats_and_stop_strings(run: Callable[..., object], engine: ThreadedEngine, model_folder: Path) -> None:
    async def work(link: EngineLink) -> None:
        client, _ = client_of(link, model_folder)
        async with client:
            assert (await client.capabilities()).chat_prompts
            chat = InferenceRequest([{"role": "user", "content": "hello"}], SHORT)
            tokens = await client.prompt_tokens(chat)
            (answer,) = await complete(client, chat)
            (same,) = await complete(client, InferenceRequest(tokens or (), SHORT))
            assert (answer.text, answer.tokens) == (same.text, same.tokens)
            assert answer.text
            stop = answer.text[2:4]
            (stopped,) = await complete(client, replace(chat, sampling=LONG, stop=(stop,)))
            assert (stopped.finish, stopped.stop_reason) == ("stop", stop)
            assert stopped.text == answer.text[: answer.text.index(stop)]
        await nothing_is_left(engine)

    run(work)


@pytest.mark.parametrize("end", ["timeout", "disconnect", "drain"])
def test_what_ends_the_request_ends_its_samples(run: Callable[..., object], engine: ThreadedEngine, end: str) -> None:
    kinds: dict[str, type[InferenceError]] = {
        "timeout": AnswerTimeoutError,
        "disconnect": ClientClosedError,
        "drain": EndpointUnavailableError,
    }

    async def work(link: EngineLink) -> None:
        client, exchange = client_of(link, seconds=0.5 if end == "timeout" else 0.0)
        async with client:
            answers = await client.submit(InferenceRequest(PROMPT, LONG, copies=4))
            await anext(client.stream(answers[0]))
            if end == "disconnect":
                exchange.client_gone()
            elif end == "drain":
                link.fail_all(UnavailableError("the server is shutting down"))
            await client.failure
            assert {type(answer.failure) for answer in answers[1:]} == {kinds[end]}
            with pytest.raises(kinds[end]):
                await client.submit(InferenceRequest(PROMPT, SHORT))
        engine.go_on()
        await nothing_is_left(engine)
        assert link.waiting == 0

    engine.hold()
    try:
        run(work)
    finally:
        engine.go_on()


def test_later_samples_of_a_request_do_not_wait_as_new_requests(run: Callable[..., object]) -> None:
    async def work(link: EngineLink) -> None:
        client, _ = client_of(link)
        async with client:
            await complete(client, InferenceRequest(PROMPT, SHORT))
            (second,) = await client.submit(InferenceRequest(PROMPT, SHORT))
            assert link.waiting == 0
            async for _ in client.stream(second):
                pass

    run(work)


async def nothing_is_left(engine: ThreadedEngine) -> None:
    await asyncio.to_thread(wait_until, lambda: engine.num_requests == 0, "the engine has no request")
