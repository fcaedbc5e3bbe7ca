"""Mode overlap: the engine in the trainer's process, with a copy of the weights, generates while the trainer trains."""

from __future__ import annotations

import asyncio
import threading

from craton.ml.posttraining.asynchronous.endpoints import Endpoints, RolloutEndpoint
from craton.ml.posttraining.asynchronous.producer import Check, RolloutProducer
from craton.ml.posttraining.shared import RolloutEngine
from craton.ml.serving import OutputDelta
from craton.ml.serving.clients import EngineClient

ENGINE = "the engine in this process"


class EngineBackend:
    """Generates with an engine that does not share the trained weights."""

    has_versions = True

    def __init__(self, engine: RolloutEngine, max_running: int) -> None:
        assert not engine.is_shared
        self._engine, self._max_running = engine, max_running
        self._client: EngineClient | None = None
        self._endpoint: RolloutEndpoint | None = None
        self._endpoints: Endpoints | None = None

    async def open(self) -> Endpoints:
        self._client = self._engine.client()
        self._endpoint = RolloutEndpoint(ENGINE, self._client, self._max_running)
        self._endpoints = Endpoints(_stop)
        self._endpoints.add(self._endpoint)
        return self._endpoints

    def update(self, version: int, producer: RolloutProducer, check: Check) -> None:
        """Copy the trained weights while the engine stands between two steps; running requests keep their KV cache. The
        copy is made by the trainer's thread: it may gather shards from other ranks."""
        standing, copied = threading.Event(), threading.Event()
        deltas: list[OutputDelta] = []

        def stand_still() -> list[OutputDelta]:
            standing.set()
            copied.wait()
            return deltas

        async def hold() -> None:
            assert self._client is not None
            self._holding = asyncio.get_running_loop().create_task(self._client.between_steps(stand_still))

        async def release() -> None:
            assert self._endpoint is not None
            await self._holding
            self._endpoint.version = version

        producer.call(hold, check)
        try:
            while not standing.wait(0.1):
                check()
            deltas += self._engine.refresh(version)
        finally:
            copied.set()
        producer.call(release, check)

    def report(self) -> None:
        """There is nothing to report: an engine that fails ends the generation."""


def _stop(endpoint: RolloutEndpoint) -> None:
    """There is no other engine to go on with."""
    raise RuntimeError(f"rollouts cannot go on: {endpoint.reason}")
