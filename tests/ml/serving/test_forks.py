"""Forks through the front end's link and the engine's process: branches go their own ways, and end alone."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

from model_pairs import LONGEST, VOCABULARY, Answer, pair
from waiting import PATIENCE_SECONDS, wait_until

from craton.ml.serving.device import EngineRank, TensorParallelGroup
from craton.ml.serving.engine import EngineProcess, build_runner, join_engine
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.heartbeat import EngineHeartbeat
from craton.ml.serving.messages import Fork, ForkBranch, OutputDelta, Sampling, Submit
from craton.ml.serving.server.link import EngineLink, Exchange
from craton.ml.serving.server.wire import Wire
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.wire import MessageLine
from craton.telemetry.rank import RankPage

PROMPT = (5, 17, 2, 80, 33, 9, 41)
LONG = Sampling(max_tokens=60, seed=3)
SETTINGS = EngineSettings(max_length=LONGEST, blocks=200, max_running=4, page=4, chunk_tokens=32)


@contextmanager
def engine_process() -> Iterator[Wire]:
    """The front end's end of a connection to an engine that runs on a thread."""
    runner, settings, _ = build_runner(copy.deepcopy(pair("llama")[1]), SETTINGS)
    group = TensorParallelGroup(EngineRank(runner))
    engine = join_engine(group, runner, settings, LONGEST)
    here, there = socket.socketpair()
    process = EngineProcess(
        "little", engine, group, MessageLine(Connection(there.detach())), EngineHeartbeat(RankPage.make())
    )
    thread = threading.Thread(target=process.run)
    thread.start()
    yield Wire(here.detach())
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


class Client:
    """One exchange, and all that its requests got."""

    def __init__(self, link: EngineLink) -> None:
        self.exchange = Exchange(link)
        self.pieces: dict[int, list[OutputDelta]] = {}

    async def read_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            for piece in await self.exchange.pieces():
                self.pieces.setdefault(piece.id, []).append(piece)

    def tokens(self, number: int) -> list[int]:
        pieces = self.pieces.get(number, [])
        return [token for piece in pieces for token in (*piece.generated, *piece.tokens)]

    def last(self, number: int) -> OutputDelta | None:
        pieces = self.pieces.get(number)
        return pieces[-1] if pieces and pieces[-1].finish is not None else None


def in_a_link(work: Callable[[Client], Awaitable[None]]) -> None:
    async def run(wire: Wire) -> None:
        link = EngineLink(wire)
        link.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.to_thread(wait_until, lambda: link.ready is not None, "the engine is ready")
                client = Client(link)
                await work(client)
                client.exchange.close()
        finally:
            link.close()

    with engine_process() as wire:
        asyncio.run(run(wire))


def alone(request: Submit) -> Answer:
    engine = build_engine(pair("llama")[1], SETTINGS)
    engine.submit(request)
    pieces = []
    while not engine.is_idle:
        pieces += engine.step()
    return Answer.of(pieces)


def test_branches_of_a_running_request_go_their_own_ways() -> None:
    async def work(client: Client) -> None:
        exchange = client.exchange
        parent = exchange.submit(PROMPT, LONG)
        await client.read_until(lambda: len(client.tokens(parent)) >= 3)
        same, other, aborted = exchange.fork(parent, 0, [LONG, replace(LONG, seed=4), replace(LONG, seed=5)])
        await client.read_until(lambda: aborted in client.pieces)
        exchange.end(aborted, 0)
        await client.read_until(lambda: all(client.last(number) for number in (parent, same, other)))
        assert client.last(aborted) is None, "nothing comes after an abort"
        whole = alone(Submit(1, PROMPT, LONG)).tokens
        assert client.tokens(parent) == client.tokens(same) == whole
        begun = client.pieces[other][0].generated
        assert 3 <= len(begun) < 60
        assert begun == whole[: len(begun)]
        twin = alone(Submit(1, PROMPT, replace(LONG, seed=4), generated=tuple(begun)))
        assert client.tokens(other) == [*begun, *twin.tokens] != whole

    in_a_link(work)


def test_a_fork_of_what_does_not_run_ends_with_an_error() -> None:
    async def work(client: Client) -> None:
        exchange = client.exchange
        ended = exchange.submit(PROMPT, replace(LONG, max_tokens=2))
        await client.read_until(lambda: client.last(ended) is not None)
        numbers = exchange.fork(ended, 0, [LONG]) + exchange.fork(12345, 0, [LONG])
        running = exchange.submit(PROMPT, LONG)
        numbers += exchange.fork(running, 1, [LONG])
        numbers += exchange.fork(running, 0, [replace(LONG, logit_bias={VOCABULARY: 1.0})])
        await client.read_until(lambda: all(client.last(number) for number in (*numbers, running)))
        errors = [last.error for number in numbers if (last := client.last(number)) is not None]
        for error in errors[:3]:
            assert "is not running; only running requests can be forked" in error
        assert "is not in the model's vocabulary" in errors[3]
        assert len(client.tokens(running)) == 60, "the others go on"

    in_a_link(work)


def test_a_branch_that_cannot_start_ends_alone() -> None:
    engine = build_engine(pair("llama")[1], SETTINGS)
    engine.submit(Submit(1, PROMPT, LONG))
    while not [piece for piece in engine.step() if piece.tokens]:
        pass
    engine.start_branches(Fork(1, (ForkBranch(2, replace(LONG, max_tokens=1)), ForkBranch(3, LONG))))
    pieces = []
    while not engine.is_idle:
        pieces += engine.step()
    ends = {piece.id: piece for piece in pieces if piece.finish is not None}
    assert "give the fork a larger max_tokens" in ends[2].error
    assert (ends[1].finish, ends[3].finish) == ("length", "length")
    engine.check()
