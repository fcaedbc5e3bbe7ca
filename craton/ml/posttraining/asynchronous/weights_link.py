"""Sends versions of the trained weights to rollout servers, full or as changes, and knows which server has which.

A server gets weights before it gets requests. One that restarted has lost them: it reports version 0, and weights of
version v are sent as v + 1, so the two are never confused. A transfer that fails leaves the server without requests
until another one succeeds.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from torch import Tensor

from craton.agent.coordination import run_secret
from craton.agent.processes import free_port
from craton.ml.models import WeightsError
from craton.ml.serving.clients import error_message
from craton.ml.serving.device import SentWeights, send_weights
from craton.telemetry import RunDirectory

VERSION_OFFSET = 1  # of the versions that servers have, from ours
LISTEN_SECONDS = 60.0  # until a server listens for weights: a step may be running
UPDATE_SECONDS = 900.0  # of one transfer
CONNECT_SECONDS = 1.0
LOOK_SECONDS = 0.05
PORT_TRIES = 3
REPLY_SECONDS = 2.0  # of a server whose transfer failed


class SharedBase(SentWeights):
    """What one server got last. The tensors are those of all servers: the sender keeps them, not this object."""

    def keep(self, name: str, tensor: Tensor) -> None:
        """The sender replaces all tensors at once."""


@dataclass(frozen=True)
class WeightsVersion:
    """The whole weights of one version, in host memory."""

    version: int
    tensors: Mapping[str, Tensor]


@dataclass
class ServerLink:
    """The way of weights to one server. `member` is its run, `num_ranks` its tensor-parallel ranks."""

    member: RunDirectory
    url: str
    num_ranks: int = 1
    base: SharedBase = field(default_factory=SharedBase)
    sent: WeightsVersion | None = None
    seconds: float = 0.0  # of the last transfer
    num_bytes: int = 0  # likewise

    async def send(self, weights: WeightsVersion, session: aiohttp.ClientSession) -> None:
        """Send weights; return once the server has them. WeightsError if it does not get them."""
        began = time.monotonic()
        host = urlsplit(self.url).hostname or "127.0.0.1"
        error = ""
        for _ in range(PORT_TRIES):
            address = f"{host}:{free_port()}"  # free here, and most likely there
            error = await self._try(address, weights, session)
            if "cannot listen" not in error:
                break
        if error:
            self.sent = None
            raise WeightsError(f"{self.member.path.name} got no weights of version {weights.version}: {error}")
        self.sent, self.seconds = weights, time.monotonic() - began

    async def version(self, session: aiohttp.ClientSession) -> int:
        """Return the version of the server's weights, as ours; WeightsError if it does not answer."""
        reply = await self._request(session, "GET", "/weights_version")
        return int(reply["weights_version"]) - VERSION_OFFSET

    async def _try(self, address: str, weights: WeightsVersion, session: aiohttp.ClientSession) -> str:
        """Let the server listen at an address and send to it; return why that failed."""
        stop = threading.Event()
        body = {"address": address, "wait_seconds": LISTEN_SECONDS}
        receiving = asyncio.create_task(self._request(session, "POST", "/update_weights", body))
        sending = asyncio.create_task(asyncio.to_thread(self._send, address, weights, stop))
        try:
            await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_COMPLETED)
            stop.set()  # a server that has replied does not listen
            await asyncio.wait((sending,))
            if sending.exception() is not None:
                await asyncio.wait((receiving,), timeout=REPLY_SECONDS)
        finally:
            stop.set()
            if sending.cancelled() or not sending.done() or sending.exception() is not None:
                receiving.cancel()
            results = await asyncio.gather(receiving, sending, return_exceptions=True)
        return next((str(result) or type(result).__name__ for result in results if isinstance(result, Exception)), "")

    def _send(self, address: str, weights: WeightsVersion, stop: threading.Event) -> None:
        host, _, port = address.rpartition(":")
        addresses = [f"{host}:{int(port) + rank}" for rank in range(self.num_ranks)]
        self.base.tensors = dict(self.sent.tensors) if self.sent is not None else {}
        if self.sent is None:
            self.base.version = None
        wire = weights.version + VERSION_OFFSET
        transfer = send_weights(
            addresses,
            run_secret(self.member),
            weights.tensors.items(),
            wire,
            self.base,
            lambda receiver: _connect_to_listener(receiver, stop),
        )
        self.num_bytes = transfer.num_bytes

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, int]:
        try:
            key = self.member.admin_key_path.read_text(encoding="ascii").strip()
            headers = {"Authorization": f"Bearer {key}"}
            timeout = aiohttp.ClientTimeout(total=UPDATE_SECONDS, sock_connect=CONNECT_SECONDS)
            async with session.request(method, self.url + path, json=body, headers=headers, timeout=timeout) as reply:
                if reply.status != 200:
                    raise WeightsError(f"HTTP {reply.status} at {path}: {error_message(await reply.text())}")
                document = await reply.json()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise WeightsError(f"no reply at {path} ({type(error).__name__})") from None
        assert isinstance(document, dict)
        return document


def _connect_to_listener(address: str, stop: threading.Event) -> socket.socket:
    """Return a connection to a server once it listens. The server gets weights by this connection, so from here on it
    notices the end of this process."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LISTEN_SECONDS
    while True:
        if stop.is_set():
            raise WeightsError("the server refused to listen for weights")
        try:
            return socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise WeightsError(f"{address} does not listen for weights: {error}") from None
        stop.wait(LOOK_SECONDS)
