"""The client of an engine in this process: interrupted answers in engines that chunk, preempt, offload and draft.

The twins run alone in an engine with room for everything, without a client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from test_continued_requests import ADAPTER, PROMPTS, SAMPLINGS, WAYS, Engines, alone, engines  # noqa: F401
from waiting import PATIENCE_SECONDS

from craton.ml.serving.clients import (
    Answer,
    EndpointUnavailableError,
    EngineClient,
    InferenceClient,
    InferenceRequest,
    MissingCapabilityError,
    RequestRefusedError,
    complete,
)
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Submit

USED = {"tight": "preemptions", "offloaded": "host_hits", "chunked": "prefix_hits", "drafting": "accepted"}


def run(engine: Engine, work: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), EngineClient(engine, random_seed=5) as client:
            await work(client)
            assert (client.num_in_flight, client._slots.taken) == (0, 0)

    asyncio.run(inside())
    engine.check()
    assert engine.is_idle
    assert engine.stats().blocks_used == 0


async def is_finished(client: InferenceClient, branch: Answer) -> bool:
    """Read a branch. False: its parent ended before the fork reached it."""
    with suppress(RequestRefusedError):
        async for _ in client.stream(branch):
            pass
    reasons = ("only running requests can be forked", "has ended", "no running request has the id")
    assert branch.failure is None or any(reason in str(branch.failure) for reason in reasons)
    return branch.failure is None


def twin_of(made: Engines, request: InferenceRequest) -> list[int]:
    prompt = tuple(int(token) for token in request.prompt)  # type: ignore[arg-type]
    submit = Submit(1, prompt, request.sampling, adapter=request.adapter, generated=request.generated)
    return [*request.generated, *alone(made.reference, submit).tokens]


def interrupt_at_random(made: Engines, way: str, num_rounds: int, draw: random.Random) -> None:
    engine = made.engine(way)
    alone(engine, Submit(1, (1, 2), replace(SAMPLINGS["greedy"], max_tokens=1)))  # after it, too many are admitted
    found: list[tuple[InferenceRequest, list[int], bool]] = []  # request, tokens, whether it is whole

    async def interrupted(client: EngineClient, request: InferenceRequest, cut: int, action: str) -> None:
        (answer,) = await client.submit(request)
        branches: list[Answer] = []
        async for _ in client.stream(answer):
            if len(answer.tokens) < cut or answer.is_done:
                continue
            if action == "continue":
                client.abort(answer)
            elif not branches:
                branches = await client.fork(answer, [replace(answer.request.sampling, seed=seed) for seed in (5, 77)])
                client.abort(branches[1])
        found.append((request, answer.tokens, answer.finish != "abort"))
        if answer.finish == "abort":
            (rest,) = await complete(client, answer.continuation())
            found.append((request, [*answer.tokens, *rest.tokens], True))
        if branches and await is_finished(client, branches[0]):
            found.append((request, [*branches[0].generated, *branches[0].tokens], True))

    async def work(client: EngineClient) -> None:
        for _ in range(num_rounds):
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    prompt = PROMPTS[draw.randrange(2)][: draw.randrange(1, 31)]
                    adapter = draw.choice([None, None, ADAPTER])
                    request = InferenceRequest(prompt, SAMPLINGS[draw.choice(sorted(SAMPLINGS))], adapter=adapter)
                    cut, action = draw.randrange(1, 15), draw.choice(["continue", "fork"])
                    group.create_task(interrupted(client, request, cut, action))

    run(engine, work)
    made.note(engine)
    for request, tokens, is_whole in found:
        twin = twin_of(made, request)
        assert tokens == (twin if is_whole else twin[: len(tokens)])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_interrupted_answers_equal_their_twins_in_every_way(engines: Engines, way: str) -> None:  # noqa: F811
    interrupt_at_random(engines, way, 1, random.Random(3))


@pytest.mark.slow
def test_many_interrupted_answers_equal_their_twins_in_every_way(engines: Engines) -> None:  # noqa: F811
    for way in WAYS:
        before = engines.used[USED.get(way, "")]
        interrupt_at_random(engines, way, 40, random.Random())
        assert way not in USED or engines.used[USED[way]] > before


def test_tokens_have_the_version_of_the_weights_that_sampled_them(engines: Engines) -> None:  # noqa: F811
    engine = engines.engine("roomy")

    async def work(client: EngineClient) -> None:
        (answer,) = await client.submit(InferenceRequest(PROMPTS[0], replace(SAMPLINGS["greedy"], ignore_eos=True)))
        async for _ in client.stream(answer):
            if await client.weights_version() == 0:
                await client.between_steps(engine.change_version)
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == {0, 1}
        assert len(answer.logprobs) == len(answer.tokens), "log-probs come without being asked for"

    run(engine, work)


def test_an_engine_that_fails_ends_its_answers(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    engine = engines.engine("roomy")

    def fail() -> None:
        raise RuntimeError("the GPU fell off")

    async def work() -> None:
        client = EngineClient(engine)
        (answer,) = await client.submit(InferenceRequest(PROMPTS[0], SAMPLINGS["plain"]))
        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(EndpointUnavailableError, match="failed: RuntimeError: the GPU fell off"):
            [delta async for delta in client.stream(answer)]
        assert client.num_in_flight == 0
        await client.close()

    asyncio.run(work())


def test_text_needs_a_tokenizer(engines: Engines) -> None:  # noqa: F811
    async def work(client: EngineClient) -> None:
        with pytest.raises(MissingCapabilityError, match="does not give text prompts; send token ids"):
            await client.submit(InferenceRequest("Once"))
        with pytest.raises(MissingCapabilityError, match=r"does not give stop strings; set sampling\.stop_tokens"):
            await client.submit(InferenceRequest([1, 2], stop=("x",)))

    run(engines.engine("roomy"), work)
