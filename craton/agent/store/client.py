"""A client of the rendezvous store. Thread-safe.

A call that waits for a key uses its connection exclusively; a concurrent call opens another one. So a waiting thread
never blocks a thread that watches the others. Once a connection breaks, all calls fail, like those of torch's own
TCPStore: a rank that is cut off from its generation must notice at the next call.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence

from craton.agent.store import wire
from craton.agent.store.wire import StoreError, StoreTimeoutError
from craton.formatting import setting

HANDSHAKE_SECONDS = 5.0
RECONNECT_SECONDS = 2.0  # for connections after the first one
AGAIN_SECONDS = 0.05  # between two connection attempts
READ_BYTES = 1 << 16
ANSWER_SECONDS = 60.0  # for calls that wait for no key


class StoreClient:
    """Connects at once and retries for `connect_seconds`; StoreError has the reason."""

    def __init__(self, address: str, secret: bytes, connect_seconds: float) -> None:
        self.address = address
        self._secret = secret
        self._lock = threading.Lock()
        self._problem = ""  # why the client is unusable
        self._idle: list[_Channel] = []
        self._idle = [self._connect(connect_seconds)]

    def set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        fields = [part for key, value in zip(keys, values, strict=True) for part in (key.encode(), value)]
        self._ask("set", fields, ANSWER_SECONDS)

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Return the values of the keys once all are set; StoreTimeoutError after `seconds`."""
        return self._ask("get", [key.encode() for key in keys], seconds)

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        self._ask("wait", [key.encode() for key in keys], seconds)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key.encode(), b"%d" % amount], ANSWER_SECONDS)[0])

    def append(self, key: str, value: bytes) -> None:
        self._ask("append", [key.encode(), value], ANSWER_SECONDS)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._ask("check", [key.encode() for key in keys], ANSWER_SECONDS) == [b"1"]

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask("compare_set", [key.encode(), expected, desired], ANSWER_SECONDS)[0]

    def delete(self, key: str) -> bool:
        return self._ask("delete", [key.encode()], ANSWER_SECONDS) == [b"1"]

    def count(self) -> int:
        return int(self._ask("count", [], ANSWER_SECONDS)[0])

    def close(self) -> None:
        """Close the client: every later call fails at once."""
        self._give_up("it was closed")

    def _ask(self, verb: str, arguments: Sequence[bytes], seconds: float) -> list[bytes]:
        channel = self._take()
        try:
            answer = channel.ask([verb.encode(), *arguments], seconds)
        except TimeoutError as error:
            channel.close()
            self._put(self._connect(RECONNECT_SECONDS))  # code that cuts our connections must always find one
            names = ", ".join(key.decode(errors="replace") for key in arguments)[:200]
            raise StoreTimeoutError(
                f"the rendezvous store at {self.address} did not answer `{verb} {names}` within {setting(seconds)}"
            ) from error
        except (OSError, ValueError) as error:
            channel.close()
            self._give_up(str(error))
            raise StoreError(f"the connection to the rendezvous store at {self.address} ended: {error}") from error
        except BaseException:
            channel.close()
            raise
        self._put(channel)
        if answer[0] != wire.DONE:
            raise StoreError(f"the rendezvous store at {self.address} refused: {answer[1].decode(errors='replace')}")
        return answer[1:]

    def _take(self) -> _Channel:
        with self._lock:
            if self._problem:
                raise StoreError(f"the connection to the rendezvous store at {self.address} ended: {self._problem}")
            channel = self._idle.pop() if self._idle else None
        return channel or self._connect(RECONNECT_SECONDS)

    def _put(self, channel: _Channel) -> None:
        with self._lock:
            if not self._problem:
                self._idle.append(channel)
                return
        channel.close()

    def _give_up(self, problem: str) -> None:
        """Make the client unusable after a broken connection: all later calls fail."""
        with self._lock:
            self._problem = self._problem or problem
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _connect(self, seconds: float) -> _Channel:
        """Connect, and retry for `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return _Channel(self.address, self._secret)
            except (OSError, ValueError) as error:
                if time.monotonic() >= deadline:
                    self._give_up(str(error))
                    raise StoreError(
                        f"the rendezvous store at {self.address} cannot be reached with the secret of this run: {error}"
                    ) from error
            time.sleep(AGAIN_SECONDS)


class _Channel:
    """One authenticated connection: client and server have proved to each other that they know the secret."""

    def __init__(self, address: str, secret: bytes) -> None:
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        self._socket = socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS)
        self._received = b""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            self._send(wire.GREETING + nonce, deadline)
            hello = self._read(wire.HELLO_BYTES, deadline)
            if not hello.startswith(wire.GREETING):
                raise ValueError("the server is not a rendezvous store of Craton")
            self._session = wire.StoreSession(secret, nonce, hello[len(wire.GREETING) :], is_client=True)
            self._send(self._session.own_proof, deadline)
            if not hmac.compare_digest(self._read(wire.MAC_BYTES, deadline), self._session.expected_proof):
                raise ValueError("the server does not know the secret")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, fields: Sequence[bytes], seconds: float) -> list[bytes]:
        """Send a request and return its answer; TimeoutError after `seconds`. Any error makes it unusable."""
        deadline = time.monotonic() + seconds
        self._send(self._session.frame(fields), deadline)
        head = self._read(wire.HEAD_BYTES, deadline)
        return self._session.open(head[-wire.MAC_BYTES :], self._read(wire.body_bytes(head), deadline))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        """Return the next `count` bytes. Reads ahead: most answers arrive whole, so one system call is enough."""
        parts, missing = [self._received], count - len(self._received)
        while missing > 0:
            self._wait(select.POLLIN, deadline)
            part = self._socket.recv(READ_BYTES)
            if not part:
                raise StoreError("the other side closed it")
            parts.append(part)
            missing -= len(part)
        data = b"".join(parts)
        self._received = data[count:]
        return data[:count]

    def _wait(self, event: int, deadline: float) -> None:
        self._poll.modify(self._socket, event)
        if not self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("no answer in time")
