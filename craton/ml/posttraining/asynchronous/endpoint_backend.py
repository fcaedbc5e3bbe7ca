"""`rollout.endpoint`: any server with OpenAI's API that returns token ids and log-probabilities generates.

It keeps its own weights, so all tokens have version 0, and staleness counts from the start of the run.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from craton.job.sections.posttraining import ApiEndpoint
from craton.ml.posttraining.asynchronous.endpoints import Endpoints, RolloutEndpoint
from craton.ml.posttraining.asynchronous.producer import Check, RolloutProducer
from craton.ml.serving.clients import InferenceError, connect, rollout_capabilities

LOOK_SECONDS = 1.0


class EndpointBackend:
    """Generates with an endpoint of which nothing is changed."""

    has_versions = False

    def __init__(
        self,
        endpoint: ApiEndpoint,
        temperature: float,
        limit: int,
        note: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        self._wanted, self._temperature, self._limit, self._note = endpoint, temperature, limit, note
        self._endpoints = Endpoints()
        self._notes: deque[tuple[str, str]] = deque()
        self._healing: set[asyncio.Task[None]] = set()
        self._has_warned = False

    async def open(self) -> Endpoints:
        wanted = self._wanted
        key = os.environ.get(wanted.key, "") if wanted.key else ""
        client = await connect(wanted.url, model=wanted.model, api_key=key or None, max_in_flight=1 << 20)
        try:
            await client.require(*rollout_capabilities(self._temperature))
            capabilities = await client.capabilities()
        except BaseException:
            await client.close()
            raise
        self._endpoints = Endpoints(self._lost, self._close)
        self._endpoints.add(
            RolloutEndpoint(
                wanted.url,
                client,
                self._limit,
                has_versions=False,
                continues=capabilities.continued_requests,
                has_seeds=capabilities.seeds,
            )
        )
        return self._endpoints

    def update(self, version: int, producer: RolloutProducer, check: Check) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._note(
                "foreign_weights",
                f"{self._wanted.url} keeps its own weights: samples are {version} steps old and grow older with every "
                "step",
            )
        self.report()

    def report(self) -> None:
        while self._notes:
            self._note(*self._notes.popleft())

    def _lost(self, endpoint: RolloutEndpoint) -> None:
        self._notes.append(("rollout_server_lost", f"{endpoint.name}: {endpoint.reason}"))
        task = asyncio.get_running_loop().create_task(self._heal(endpoint))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _heal(self, endpoint: RolloutEndpoint) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            key = os.environ.get(self._wanted.key, "") if self._wanted.key else ""
            try:
                client = await connect(
                    self._wanted.url, model=self._wanted.model, api_key=key or None, max_in_flight=1 << 20
                )
            except InferenceError:
                continue
            await client.close()
            self._endpoints.restore(endpoint, 0)
            self._notes.append(("rollout_server_restored", endpoint.name))
            return

    async def _close(self) -> None:
        for task in self._healing:
            task.cancel()
        await asyncio.gather(*self._healing, return_exceptions=True)
