"""The server of the rendezvous store: one thread, one dictionary, only clients that proved the run's secret.

A connection that does not prove the secret within `HANDSHAKE_SECONDS` is closed; with more than `MAX_STRANGERS` of
them the oldest is closed. So strangers cannot exhaust descriptors, and a client that they crowd out dials again.
Invalid data ends only the connection that sent it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from craton.agent.store.wire import (
    DONE,
    GREETING,
    HEAD_BYTES,
    HELLO_BYTES,
    MAC_BYTES,
    NONCE_BYTES,
    WRONG,
    StoreSession,
    body_bytes,
)
from craton.formatting import setting

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 256  # unauthenticated connections; the usual limit of open files is 1,024
BACKLOG = 1024  # a thousand ranks may dial at the same moment
READ_BYTES = 1 << 16  # malloc maps larger buffers again for each read
FULL_SECONDS = 0.05  # pause between accepts when no descriptors are left

Verb = Callable[["_Connection", list[bytes]], list[bytes] | None]  # None: the answer comes later


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    nonce: bytes
    close_at: float
    session: StoreSession | None = None
    is_trusted: bool = False
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    waits: _Wait | None = None
    is_full: bool = False  # whether to wait until the socket is writable


@dataclass(eq=False)
class _Wait:
    """A request that waits for keys that are not set yet."""

    connection: _Connection
    missing: set[bytes]
    values_of: list[bytes]  # keys whose values form the answer


class StoreServer:
    """Listens on `address` once constructed; `start` serves in a background thread."""

    def __init__(self, host: str, secret: bytes, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"{host}:{self.port}"
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Wait]] = {}
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakeup, self._wakeup_writer = os.pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._verbs: dict[bytes, Verb] = {
            b"set": self._set,
            b"get": self._get,
            b"wait": self._wait,
            b"add": self._add,
            b"append": self._append,
            b"check": self._check,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"count": lambda connection, arguments: [b"%d" % len(self._values)],
        }

    def start(self) -> StoreServer:
        self._thread = threading.Thread(target=self.serve_forever, name="store", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Close every connection and stop serving."""
        os.write(self._wakeup_writer, b"\0")
        if self._thread is not None:
            self._thread.join()

    def serve_forever(self) -> None:
        """Serve until `close`."""
        while self._turn():
            pass
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                self._close(key.data)
        self._selector.close()
        self._listener.close()
        os.close(self._wakeup)
        os.close(self._wakeup_writer)

    def _turn(self) -> bool:
        """Wait for events and handle them; False: the server is closed."""
        oldest = next(iter(self._strangers), None)
        seconds = None if oldest is None else max(0.0, oldest.close_at - time.monotonic())
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wakeup:
                return False
            else:
                self._attend(key.data, events)
        if self._strangers:
            now = time.monotonic()
            for stranger in [item for item in self._strangers if item.close_at <= now]:
                self._refuse(stranger, f"no proof of the secret within {setting(HANDSHAKE_SECONDS)}")
        return True

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(error)
                return
            accepted.setblocking(False)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = _Connection(accepted, secrets.token_bytes(NONCE_BYTES), time.monotonic() + HANDSHAKE_SECONDS)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)), f"more than {MAX_STRANGERS} unauthenticated connections")

    def _make_room(self, error: OSError) -> None:
        if self._strangers:
            self._refuse(next(iter(self._strangers)), str(error))
        else:
            time.sleep(FULL_SECONDS)

    def _attend(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(READ_BYTES)
                if not data:
                    self._close(connection)
                    return
                connection.incoming += data
                self._digest(connection)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._refuse(connection, str(error))

    def _digest(self, connection: _Connection) -> None:
        """Handle all complete requests."""
        if not connection.is_trusted and not self._shake_hands(connection):
            return
        session, incoming = connection.session, connection.incoming
        assert session is not None
        while len(incoming) >= HEAD_BYTES:
            end = HEAD_BYTES + body_bytes(incoming)
            if len(incoming) < end:
                return
            mac, body = bytes(incoming[HEAD_BYTES - MAC_BYTES : HEAD_BYTES]), bytes(incoming[HEAD_BYTES:end])
            del incoming[:end]
            answer = self._answer(connection, session.open(mac, body))
            if answer is not None:
                self._send(connection, session.frame(answer))

    def _shake_hands(self, connection: _Connection) -> bool:
        """Continue the handshake; True once the connection is trusted."""
        incoming = connection.incoming
        if not GREETING.startswith(incoming[: len(GREETING)]):
            raise ValueError("not a client of this store")
        if connection.session is None:
            if len(incoming) < HELLO_BYTES:
                return False
            nonce = bytes(incoming[len(GREETING) : HELLO_BYTES])
            connection.session = StoreSession(self._secret, nonce, connection.nonce, is_client=False)
            self._send(connection, GREETING + connection.nonce)
        if len(incoming) < HELLO_BYTES + MAC_BYTES:
            return False
        proof = bytes(incoming[HELLO_BYTES : HELLO_BYTES + MAC_BYTES])
        if not hmac.compare_digest(proof, connection.session.expected_proof):
            raise ValueError("the client does not know the secret of this run")
        del incoming[: HELLO_BYTES + MAC_BYTES]
        connection.is_trusted = True
        self._strangers.pop(connection, None)
        self._send(connection, connection.session.own_proof)
        return True

    def _send(self, connection: _Connection, data: bytes) -> None:
        if not connection.is_full:
            with contextlib.suppress(BlockingIOError):
                data = data[connection.socket.send(data) :]
            if not data:
                return
        connection.outgoing += data
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = connection.socket.send(connection.outgoing)
            del connection.outgoing[:sent]
        if connection.is_full != bool(connection.outgoing):
            connection.is_full = not connection.is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_full else 0)
            self._selector.modify(connection.socket, events, connection)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        """Close an invalid connection. Log the 1st, 2nd, 4th, 8th … only: strangers must not fill the log."""
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            with contextlib.suppress(OSError, ValueError):
                times = f" ({self._refused} so far)" if self._refused > 1 else ""
                print(f"store {self.address}: closed a connection{times}: {reason}", file=sys.stderr, flush=True)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        if connection.waits is not None:
            self._forget(connection.waits)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    # -- verbs ----------------------------------------------------------------------------------------------------

    def _answer(self, connection: _Connection, fields: list[bytes]) -> list[bytes] | None:
        verb = self._verbs.get(fields[0]) if fields else None
        if verb is None:
            return [WRONG, b"unknown verb"]
        try:
            answer = verb(connection, fields[1:])
        except (ValueError, IndexError) as error:
            return [WRONG, f"{fields[0].decode(errors='replace')}: {error}".encode()]
        return None if answer is None else [DONE, *answer]

    def _set(self, connection: _Connection, arguments: list[bytes]) -> list[bytes]:
        """Set alternating keys and values."""
        for key, value in zip(arguments[::2], arguments[1::2], strict=True):
            self._put(key, value)
        return []

    def _get(self, connection: _Connection, keys: list[bytes]) -> list[bytes] | None:
        return self._when_set(connection, keys, keys)

    def _wait(self, connection: _Connection, keys: list[bytes]) -> list[bytes] | None:
        return self._when_set(connection, keys, [])

    def _add(self, connection: _Connection, arguments: list[bytes]) -> list[bytes]:
        key, amount = arguments
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        return [total]

    def _append(self, connection: _Connection, arguments: list[bytes]) -> list[bytes]:
        key, value = arguments
        self._put(key, self._values.get(key, b"") + value)
        return []

    def _check(self, connection: _Connection, keys: list[bytes]) -> list[bytes]:
        return [b"1" if all(key in self._values for key in keys) else b"0"]

    def _compare_set(self, connection: _Connection, arguments: list[bytes]) -> list[bytes]:
        """Compare and set like TCPStore: an empty `expected` stands for a key that is not set."""
        key, expected, desired = arguments
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
            return [desired]
        return [self._values.get(key, expected)]

    def _delete(self, connection: _Connection, arguments: list[bytes]) -> list[bytes]:
        (key,) = arguments
        return [b"0" if self._values.pop(key, None) is None else b"1"]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                self._serve(wait)

    def _when_set(self, connection: _Connection, keys: list[bytes], values_of: list[bytes]) -> list[bytes] | None:
        missing = {key for key in keys if key not in self._values}
        if not missing:
            return [self._values[key] for key in values_of]
        if connection.waits is not None:
            raise ValueError("this connection already waits for another answer")
        connection.waits = _Wait(connection, missing, values_of)
        for key in missing:
            self._waiting.setdefault(key, []).append(connection.waits)
        return None

    def _serve(self, wait: _Wait) -> None:
        """Answer a request whose last key was set; wait again for a key that was deleted meanwhile."""
        connection = wait.connection
        connection.waits = None
        answer = self._when_set(connection, wait.values_of, wait.values_of)
        if answer is None:
            return
        assert connection.session is not None
        try:
            self._send(connection, connection.session.frame([DONE, *answer]))
        except OSError as error:  # not the fault of the client that set the key
            self._refuse(connection, str(error))

    def _forget(self, wait: _Wait) -> None:
        for key in wait.missing:
            waits = self._waiting.get(key, [])
            with contextlib.suppress(ValueError):
                waits.remove(wait)
            if not waits:
                self._waiting.pop(key, None)
