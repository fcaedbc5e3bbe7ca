"""Weights on their way to a rollout server: all of them, what changed, and transfers that are cut or refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from rollout_models import CONFIGS

from craton.agent.coordination import run_secret
from craton.ml.models import Decoder, WeightsError
from craton.ml.posttraining.asynchronous.weights_link import ServerLink, WeightsVersion
from craton.ml.serving.device import named_targets
from craton.ml.serving.device.weight_deltas import HeldWeights
from craton.ml.serving.device.weights import WeightsReceiver
from craton.telemetry import RunDirectory

ADMIN_KEY = "an admin key of this test"


class AdminServer:
    """The admin endpoints of a server, over a model in this process."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.model, self.held = run, make_model(1), HeldWeights()
        self.version = 0
        self.fault = ""  # of the next update

    async def update(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {ADMIN_KEY}"
        address = (await request.json())["address"]
        fault, self.fault = self.fault, ""
        if fault == "refuse":
            return web.json_response({"error": {"message": "the engine is asleep"}}, status=400)
        receive = self._cut if fault == "cut" else self._receive
        try:
            self.version = await asyncio.to_thread(receive, address)
        except WeightsError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return web.json_response({"result": {"version": self.version}})

    async def weights_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weights_version": self.version})

    def _receive(self, address: str) -> int:
        with WeightsReceiver(address, run_secret(self.run)) as receiver:
            return receiver.receive(self.model, 30.0, self.held)

    def _cut(self, address: str) -> int:
        """Take the connection of the sender, and close it at once."""
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))) as listener:
            listener.accept()[0].close()
        raise WeightsError("lost the connection")


def make_model(seed: int) -> Decoder:
    model = Decoder(CONFIGS["llama"])
    model.initialize(seed)
    return model


def weights_of(model: Decoder, version: int) -> WeightsVersion:
    return WeightsVersion(version, {name: tensor.detach().clone() for name, tensor in named_targets(model).items()})


def has_weights(model: Decoder, weights: WeightsVersion) -> bool:
    return all(torch.equal(tensor, weights.tensors[name]) for name, tensor in named_targets(model).items())


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[AdminServer, ServerLink, aiohttp.ClientSession]]:
    run = RunDirectory.create(folder, "rollout-0")
    run.admin_key_path.write_text(ADMIN_KEY)
    server = AdminServer(run)
    application = web.Application()
    application.router.add_post("/update_weights", server.update)
    application.router.add_get("/weights_version", server.weights_version)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        async with aiohttp.ClientSession() as session:
            yield server, ServerLink(run, f"http://127.0.0.1:{port}"), session
    finally:
        await runner.cleanup()


Work = Callable[[AdminServer, ServerLink, aiohttp.ClientSession], Awaitable[None]]


def play(folder: Path, work: Work) -> None:
    async def inside() -> None:
        async with served(folder) as parts:
            await work(*parts)

    asyncio.run(inside())


def test_what_changed_is_sent_after_all_weights(tmp_path: Path) -> None:
    async def work(server: AdminServer, link: ServerLink, session: aiohttp.ClientSession) -> None:
        model = make_model(2)
        first = weights_of(model, 0)
        assert await link.version(session) == -1, "weights that it began with"
        await link.send(first, session)
        assert has_weights(server.model, first)
        assert await link.version(session) == 0
        whole = link.num_bytes
        with torch.no_grad():
            model.head_weight[3, 5] += 1.0
        second = weights_of(model, 1)
        await link.send(second, session)
        assert has_weights(server.model, second)
        assert link.num_bytes < whole / 10
        assert server.version == 2

    play(tmp_path, work)


@pytest.mark.parametrize("fault", ["cut", "refuse"])
def test_after_a_failed_transfer_all_weights_are_sent_again(tmp_path: Path, fault: str) -> None:
    async def work(server: AdminServer, link: ServerLink, session: aiohttp.ClientSession) -> None:
        first, second = weights_of(make_model(2), 0), weights_of(make_model(3), 1)
        await link.send(first, session)
        whole = link.num_bytes
        server.fault = fault
        with pytest.raises(WeightsError, match="rollout-0 got no weights of version 1: "):
            await link.send(second, session)
        assert link.sent is None
        await link.send(second, session)
        assert has_weights(server.model, second)
        assert link.num_bytes == whole

    play(tmp_path, work)


def test_a_server_that_is_gone_gets_no_weights(tmp_path: Path) -> None:
    async def work(server: AdminServer, link: ServerLink, session: aiohttp.ClientSession) -> None:
        gone = ServerLink(link.member, "http://127.0.0.1:9")
        with pytest.raises(WeightsError, match="no reply at /update_weights"):
            await gone.send(weights_of(make_model(2), 0), session)
        with pytest.raises(WeightsError, match="no reply at /weights_version"):
            await gone.version(session)

    play(tmp_path, work)
