"""Replicas of slots at another node's keeper (the buddy), over TCP.

Before anything else is read, both sides prove with HMAC-SHA256 over each other's random challenge that they know the
run's secret. A push is a header, the bytes directly from the slot's file, and an answer. The receiver verifies every
block against the sender's checksums before the copy counts. An error costs only the copy and is reported to the sender.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Protocol

from craton.agent.errors import KeeperError
from craton.agent.memory.slots import (
    BLOCK_BYTES,
    HEADER_BYTES,
    receive_exactly,
    receive_into,
    receive_message,
    send_message,
)
from craton.formatting import setting

CONNECT_SECONDS = 5.0
STALL_SECONDS = 10.0  # without a byte, after which the other side counts as dead
PUSH_SECONDS = 120.0  # for one slot; a slower network cannot keep up with training
RETRY_SECONDS = 30.0  # after a failed push, during which this buddy is not tried again

_CHALLENGE_BYTES = 32
_CHUNK_BYTES = 64 * 2**20


class CopyPlace(Protocol):
    """The target of a copy."""

    def data(self) -> memoryview: ...

    def commit(self, manifest: dict[str, Any]) -> None: ...

    def release(self) -> None: ...


class Buddies:
    """Connections to other keepers: one per rank of this node, so that pushes run in parallel."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, int], socket.socket] = {}
        self._resting: dict[str, tuple[float, str]] = {}  # buddies that are not tried: since when, and why

    def push(self, address: str, descriptor: int, manifest: Mapping[str, Any], keep: str | None) -> None:
        """Copy a slot; KeeperError says why there is no copy."""
        with self._lock:
            since, problem = self._resting.get(address, (-RETRY_SECONDS, ""))
            connection = self._connections.pop((address, manifest["rank"]), None)
        if time.monotonic() - since < RETRY_SECONDS:
            raise KeeperError(f"{problem}; the next attempt is {setting(RETRY_SECONDS)} after that")
        try:
            connection = connection or self._connect(address)
            self._send(connection, descriptor, manifest, keep)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            problem = f"no copy at the keeper {address}: {error}"
            if not isinstance(error, KeeperError):  # then it answered, and the next push may succeed
                with self._lock:
                    self._resting[address] = (time.monotonic(), problem)
            raise KeeperError(problem) from error
        with self._lock:
            self._resting.pop(address, None)
            self._connections[address, manifest["rank"]] = connection

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
        try:
            connection.settimeout(STALL_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, ours = receive_exactly(connection, _CHALLENGE_BYTES), secrets.token_bytes(_CHALLENGE_BYTES)
            connection.sendall(ours + _proof(self._secret, b"sender", theirs, ours))
            expected = _proof(self._secret, b"receiver", ours, theirs)
            if not hmac.compare_digest(receive_exactly(connection, len(expected)), expected):
                raise ConnectionError("the other keeper does not know the secret of this run")
        except BaseException:
            connection.close()
            raise
        return connection

    def _send(self, connection: socket.socket, descriptor: int, manifest: Mapping[str, Any], keep: str | None) -> None:
        deadline = time.monotonic() + PUSH_SECONDS
        send_message(connection, {"manifest": dict(manifest), "keep": keep})
        connection.settimeout(PUSH_SECONDS / 2)  # at first the receiver allocates gigabytes of memory
        _check_answer(connection)
        connection.settimeout(STALL_SECONDS)
        _send_file(connection, descriptor, manifest["bytes"], deadline)
        connection.settimeout(max(STALL_SECONDS, deadline - time.monotonic()))  # while the last blocks are checked
        _check_answer(connection)


def receive_copies(
    connection: socket.socket,
    secret: bytes,
    take: Callable[[dict[str, Any], str | None], CopyPlace],
    summing: Executor,
    crc32: Callable[[memoryview], int],
    trust: Callable[[], None],
) -> None:
    """Serve another keeper until it closes; ConnectionError or ValueError if it is not one of this run. Call `trust`
    once the other side has proved the secret."""
    connection.settimeout(STALL_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(ours)
    theirs = receive_exactly(connection, _CHALLENGE_BYTES)
    expected = _proof(secret, b"sender", ours, theirs)
    if not hmac.compare_digest(receive_exactly(connection, len(expected)), expected):
        raise ConnectionError("the other keeper does not know the secret of this run")
    trust()
    connection.sendall(_proof(secret, b"receiver", theirs, ours))
    while True:
        connection.settimeout(None)
        received = receive_message(connection)
        if received is None:
            return
        connection.settimeout(STALL_SECONDS)
        manifest, keep = received[0]["manifest"], received[0]["keep"]
        try:
            place = take(manifest, keep)
        except KeeperError as error:
            send_message(connection, {"error": str(error)})
            continue
        try:
            send_message(connection, {})
            changed = _receive_checked(connection, place.data(), manifest["sums"], summing, crc32)
            if changed is None:
                place.commit(manifest)
        finally:
            place.release()
        send_message(connection, {} if changed is None else {"error": f"block {changed} arrived corrupted"})


def _receive_checked(
    connection: socket.socket,
    data: memoryview,
    sums: list[int],
    summing: Executor,
    crc32: Callable[[memoryview], int],
) -> int | None:
    """Receive the data and verify each block while the next ones arrive; return the first corrupted block."""
    checksums: list[Future[int]] = []
    for begin in range(0, data.nbytes, BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        receive_into(connection, block)
        checksums.append(summing.submit(crc32, block))
    wrong = [
        index for index, (item, expected) in enumerate(zip(checksums, sums, strict=True)) if item.result() != expected
    ]
    return wrong[0] if wrong else None


def _send_file(connection: socket.socket, descriptor: int, num_bytes: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    offset, end = HEADER_BYTES, HEADER_BYTES + num_bytes
    while offset < end:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{offset - HEADER_BYTES:,} of {num_bytes:,} bytes were sent in {setting(PUSH_SECONDS)}")
        try:
            sent = os.sendfile(connection.fileno(), descriptor, offset, min(_CHUNK_BYTES, end - offset))
        except BlockingIOError:
            if not poll.poll(1000 * min(left, STALL_SECONDS)):
                raise TimeoutError(f"it accepted no data for {setting(STALL_SECONDS)}") from None
            continue
        if sent == 0:
            raise ConnectionError("the slot ended before its bytes were sent")
        offset += sent


def _check_answer(connection: socket.socket) -> None:
    received = receive_message(connection)
    if received is None:
        raise ConnectionError("it closed the connection")
    if "error" in received[0]:
        raise KeeperError(received[0]["error"])


def _proof(secret: bytes, role: bytes, challenge: bytes, other: bytes) -> bytes:
    return hmac.new(secret, role + challenge + other, hashlib.sha256).digest()


def close_quietly(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
