"""Mode separate: member runs `rollout-0` … generate. The trainer sends them its weights after every step.

A server that is lost takes no requests until rank 0 has sent it all weights again; its generations go on elsewhere, or
wait for it. Every rank sends requests to all servers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import torch.distributed as dist

from craton.errors import CratonError
from craton.ml.models import WeightsError
from craton.ml.posttraining.asynchronous.endpoints import Endpoints, RolloutEndpoint
from craton.ml.posttraining.asynchronous.producer import Check, RolloutProducer
from craton.ml.posttraining.asynchronous.weights_link import VERSION_OFFSET, ServerLink, WeightsVersion
from craton.ml.posttraining.gathering import TrainedWeights
from craton.ml.serving.clients import InferenceError, Retries, ServerClient, Timeouts
from craton.ml.training.parallel import Ranks
from craton.telemetry import RunDirectory
from craton.telemetry.members import MEMBERS_FOLDER, MemberAddress, member_addresses, read_members_status

LOOK_SECONDS = 0.25  # between two looks at lost servers
ALIVE_SECONDS = 1.0  # between two questions to a server whether it lives
SILENT_SECONDS = 10.0  # after which a server that does not answer them is lost
TIMEOUTS = Timeouts(first_token=0.0, between_tokens=0.0)  # a server that hangs does not answer ALIVE_SECONDS' question
NO_RETRIES = Retries(max_tries=1)  # a server that restarts has other weights: it must not continue an answer


class RolloutServersError(CratonError):
    """No rollout server is left."""


class ServersBackend:
    """All ranks make one; rank 0 sends the weights."""

    has_versions = True

    def __init__(
        self,
        run: RunDirectory,
        names: Sequence[str],
        weights: TrainedWeights,
        ranks: Ranks,
        limit: int,
        num_ranks: int = 1,
        note: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        """`limit`: copies that this rank lets a server generate at a time. `num_ranks`: of each server."""
        self._run, self._names, self._weights, self._ranks = run, tuple(names), weights, ranks
        self._limit, self._num_ranks, self._note = limit, num_ranks, note
        self._endpoints = Endpoints()
        self._links: dict[str, ServerLink] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._newest: WeightsVersion | None = None  # on rank 0
        self._version = 0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._notes: deque[tuple[str, str]] = deque()

    async def open(self) -> Endpoints:
        self._endpoints = Endpoints(self._lost, self._close)
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._links, self._locks = {}, {}
        self._connect()
        self._tasks = [asyncio.create_task(self._watch(name)) for name in self._names]
        return self._endpoints

    def update(self, version: int, producer: RolloutProducer, check: Check) -> None:
        """Send the trained weights to all servers that can be reached."""
        tensors = {}
        for name, tensor in self._weights.merged():  # all ranks gather
            if self._ranks.rank == 0:
                tensors[name] = tensor.detach().cpu().clone()
        updated: list[Any] = [None]
        if self._ranks.rank == 0:
            self._newest = WeightsVersion(version, tensors)
            updated = [producer.call(lambda: self._send_all(self._newest), check)]
        if self._ranks.world > 1:
            dist.broadcast_object_list(updated, src=0)

        async def take_over() -> None:
            self._version = version
            for endpoint in self._endpoints.endpoints:
                if endpoint.name in updated[0]:
                    self._endpoints.restore(endpoint, version)
                elif endpoint.is_ready:
                    self._endpoints.lose(endpoint, f"it did not get the weights of version {version}")

        producer.call(take_over, check)
        self.report()

    def report(self) -> None:
        """Record what happened to servers; RolloutServersError if none will come back. For the trainer's thread."""
        while self._notes:
            name, reason = self._notes.popleft()
            if self._ranks.rank == 0:
                self._note(name, reason)
        if any(endpoint.is_ready for endpoint in self._endpoints.endpoints):
            return
        members = read_members_status(self._run).members
        states = {name: members[name] for name in self._names if name in members}
        if states and all(state.state in ("failed", "stopped") for state in states.values()):
            name, state = next(iter(states.items()))
            raise RolloutServersError(
                f"all rollout servers have ended ({name} {state.state}: {state.message or 'no reason given'}); see "
                f"`craton why {self._run.name}/{name}`, then `craton resume {self._run.name}`"
            )

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Know every server at its present address."""
        for name, address in member_addresses(self._run).items():
            link = self._links.get(name)
            if name not in self._names or (link is not None and link.url == address.url):
                continue
            member = RunDirectory(self._run.path / MEMBERS_FOLDER / name)
            self._links[name] = ServerLink(member, address.url, self._num_ranks)
            self._locks.setdefault(name, asyncio.Lock())
            client = _client(address)
            known = self._endpoint(name)
            if known is None:
                new = RolloutEndpoint(name, client, self._limit, version_offset=VERSION_OFFSET, is_ready=False)
                self._endpoints.add(new)
            else:
                known.client, known.is_ready = client, False

    def _endpoint(self, name: str) -> RolloutEndpoint | None:
        return next((endpoint for endpoint in self._endpoints.endpoints if endpoint.name == name), None)

    async def _send_all(self, weights: WeightsVersion | None) -> list[str]:
        """Send weights to all servers at the same time; return the names of those that have them."""
        assert weights is not None
        self._connect()
        names = list(self._links)
        done = await asyncio.gather(*(self._send(name, weights) for name in names))
        return [name for name, is_done in zip(names, done, strict=True) if is_done]

    async def _send(self, name: str, weights: WeightsVersion) -> bool:
        assert self._session is not None
        async with self._locks[name]:
            link = self._links[name]
            if link.sent is not None and link.sent.version > weights.version:
                link.sent = None  # of steps that are trained again
            try:
                await link.send(weights, self._session)
            except WeightsError as error:
                endpoint = self._endpoint(name)
                if endpoint is not None:
                    self._endpoints.lose(endpoint, str(error))
                return False
        return True

    async def _watch(self, name: str) -> None:
        """Notice that a server is lost, and make it ready again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._connect()
            endpoint, link = self._endpoint(name), self._links.get(name)
            if endpoint is None or link is None:
                continue
            if endpoint.is_ready:
                await self._check_alive(endpoint)
            elif self._ranks.rank == 0:
                await self._heal(endpoint)
            elif await self._has_newest(link):
                self._endpoints.restore(endpoint, self._version)

    async def _check_alive(self, endpoint: RolloutEndpoint) -> None:
        """Take a server for lost that does not answer: its generations go on elsewhere."""
        await asyncio.sleep(ALIVE_SECONDS)
        client = endpoint.client
        assert isinstance(client, ServerClient)
        reason = "it does not answer"
        with contextlib.suppress(InferenceError, TimeoutError):
            async with asyncio.timeout(SILENT_SECONDS):
                if await client.weights_version():
                    return
                reason = "it restarted"  # with version 0
        if client is endpoint.client and endpoint.is_ready:
            self._endpoints.lose(endpoint, reason)
            # A client that was closed takes no requests; its open ones fail, and go on elsewhere.
            if (address := member_addresses(self._run).get(endpoint.name)) is not None:
                endpoint.client = _client(address)
            else:
                del self._links[endpoint.name]
            await client.close()

    async def _heal(self, endpoint: RolloutEndpoint) -> None:
        """Send the newest weights to a server that answers again, all of them: it may have restarted."""
        weights, link = self._newest, self._links[endpoint.name]
        if weights is None or link.sent is weights or self._locks[endpoint.name].locked():
            return
        assert self._session is not None
        try:
            await link.version(self._session)
        except WeightsError:
            return
        if await self._send(endpoint.name, weights) and self._newest is weights:
            self._endpoints.restore(endpoint, weights.version)
            self._notes.append(("rollout_server_restored", f"{endpoint.name} has weights of version {weights.version}"))

    async def _has_newest(self, link: ServerLink) -> bool:
        assert self._session is not None
        try:
            return await link.version(self._session) == self._version
        except WeightsError:
            return False

    def _lost(self, endpoint: RolloutEndpoint) -> None:
        if (link := self._links.get(endpoint.name)) is not None:
            link.sent = None  # it may restart
        self._notes.append(("rollout_server_lost", f"{endpoint.name}: {endpoint.reason}"))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def _client(address: MemberAddress) -> ServerClient:
    key = address.api_key or None
    return ServerClient(address.url, None, key, TIMEOUTS, NO_RETRIES, max_in_flight=1 << 20)
