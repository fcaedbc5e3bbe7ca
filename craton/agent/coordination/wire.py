"""The protocol between agents: small JSON messages over TCP, each signed with the run's secret.

Both sides prove that they know the secret before anything else is read. A frame is its length, an HMAC-SHA256 over the
connection's two nonces, direction, frame number and text, and the text. So frames cannot be forged, replayed or
reordered. A connection that breaks these rules is closed. Threads read, and pass messages to the agent's single loop.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from craton.agent.errors import LaunchError
from craton.agent.processes import address_towards
from craton.limits import explain
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular

GREETING = b"craton1 "
NONCE_BYTES, MAC_BYTES = 16, 32
MAX_FRAME_BYTES = 8 << 20
MAX_STRANGERS = 128
HANDSHAKE_SECONDS = 3.0
SEND_SECONDS = 3.0
ACCEPT_AGAIN_SECONDS = 0.1
SECRET_CHARACTERS = 64  # hexadecimal: 256 bits

Message = dict[str, Any]


def run_secret(run: RunDirectory) -> bytes:
    """Return the run's secret; create it on first use. LaunchError if it is empty or too short; OSError if it cannot be
    created or read."""
    if (secret := check_secret(run)) is not None:
        return secret
    _make_secret(run)
    secret = check_secret(run)
    if secret is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run.secret_path))
    return secret


def own_address(master_address: str, master_port: int) -> str:
    """Return the address at which other nodes reach this one; loopback if all nodes are on this machine."""
    if master_address in ("127.0.0.1", "localhost", "::1"):
        return "127.0.0.1"
    try:
        return address_towards(master_address, master_port)
    except OSError as error:
        raise LaunchError(
            f"cannot reach {master_address} ({error.strerror}); set CRATON_ADDRESS to the address at which the other "
            "nodes reach this one"
        ) from error


def check_secret(run: RunDirectory) -> bytes | None:
    """Return the run's secret, or None if it does not exist yet; LaunchError and OSError as above."""
    try:
        secret = read_regular(run.secret_path)
    except FileNotFoundError:
        return None
    if len(secret.strip()) < SECRET_CHARACTERS:
        raise LaunchError(
            f"{run.secret_path} has {len(secret.strip())} characters, but a secret has {SECRET_CHARACTERS}; remove it "
            f"while the run is stopped, then `craton resume {run.name}` creates a new one"
        )
    return secret


def _make_secret(run: RunDirectory) -> None:
    """Create the secret atomically: of two agents that do so at the same time, the first wins."""
    fresh = run.secret_path.with_name(f".secret.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            text = secrets.token_hex(SECRET_CHARACTERS // 2).encode()
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(fresh))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, run.secret_path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)


class Link:
    """One connection to another agent. One thread may `send` while another one reads."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: bytes, dialed: bool) -> None:
        self._connection, self._secret, self._nonces = connection, secret, nonces
        self._directions = (b">", b"<") if dialed else (b"<", b">")
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self.is_open = True
        self.node = ""  # the node at the other end, once it has introduced itself

    def send(self, message: Message) -> bool:
        """Send a message; False, and the link is closed, if the other side is gone."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            mac = self._mac(self._directions[0], self._sent, text)
            self._sent += 1
            try:
                self._connection.sendall(struct.pack(">I", len(text)) + mac + text)
            except OSError:
                self.close()
                return False
        return True

    def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message; None if the link is closed or invalid, or nothing arrives in time."""
        try:
            self._connection.settimeout(seconds)
            (length,) = struct.unpack(">I", self._read(4))
            if length > MAX_FRAME_BYTES:
                raise OSError(f"frame length {length:,} exceeds the limit of {MAX_FRAME_BYTES:,} bytes")
            mac, text = self._read(MAC_BYTES), self._read(length)
            if not hmac.compare_digest(mac, self._mac(self._directions[1], self._received, text)):
                raise OSError("a frame is not signed with the secret of this run")
            self._received += 1
            message = json.loads(text)
            if not isinstance(message, dict):
                raise ValueError(text)
            return message
        except (OSError, ValueError):
            self.close()
            return None

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _mac(self, direction: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._secret, self._nonces + direction + struct.pack(">Q", number) + text, "sha256")

    def _read(self, count: int) -> bytes:
        return _read(self._connection, count)


def dial(address: str, secret: bytes, timeout: float = HANDSHAKE_SECONDS) -> Link | None:
    """Connect to the agent at host:port; None if none listens there that knows the secret."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except (OSError, ValueError):
        return None
    return _shake_hands(connection, secret, dialed=True)


class Strangers:
    """Connections that have not proved yet that they know the run's secret.

    Their number is bounded: when another one arrives, the oldest is shut down. So strangers who hold connections open
    cannot exhaust the threads and descriptors of an agent or keeper. A peer of the run proves the secret within
    milliseconds, and dials again if it was crowded out. Thread-safe. The caller still closes what it added.
    """

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections[connection] = None
            if len(self._connections) > self._limit:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that proved the secret or is closed."""
        with self._lock:
            self._connections.pop(connection, None)


class Listener:
    """Accepts other agents; passes every authenticated link to `welcome`, each in its own thread."""

    def __init__(self, host: str, secret: bytes, welcome: Callable[[Link], None]) -> None:
        self._socket = socket.create_server((host, 0), backlog=128)
        self._secret, self._welcome, self._closed = secret, welcome, False
        self._strangers = Strangers()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="agents", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        has_warned = False
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE) and not has_warned:
                    has_warned = True
                    print(f"craton agent: cannot accept another agent: {explain(error)}", file=sys.stderr, flush=True)
                time.sleep(ACCEPT_AGAIN_SECONDS)  # too many open files, or the caller is gone
                continue
            self._strangers.add(connection)
            threading.Thread(target=self._greet, args=(connection,), name="agent", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        link = _shake_hands(connection, self._secret, dialed=False)
        self._strangers.remove(connection)
        if link is not None:
            self._welcome(link)


def _shake_hands(connection: socket.socket, secret: bytes, dialed: bool) -> Link | None:
    """Each side sends a nonce and signs both nonces; the side that dialed signs first."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(GREETING + mine)
        greeting = _read(connection, len(GREETING) + NONCE_BYTES, deadline)
        theirs = greeting[len(GREETING) :]
        if not greeting.startswith(GREETING) or theirs == mine:
            raise OSError("not an agent")
        nonces = mine + theirs if dialed else theirs + mine
        proofs = [hmac.digest(secret, nonces + side, "sha256") for side in (b"dialed", b"listened")]
        own, other = proofs if dialed else reversed(proofs)
        if dialed:
            connection.sendall(own)
        if not hmac.compare_digest(_read(connection, MAC_BYTES, deadline), other):
            raise OSError("wrong secret")
        if not dialed:
            connection.sendall(own)
        connection.settimeout(None)
        # Linux: a send to a machine that vanished fails after this time, not after 15 minutes.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
    except OSError:
        connection.close()
        return None
    return Link(connection, secret, nonces, dialed)


def _read(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Read `count` bytes; OSError if the other side closes or the deadline passes, even if single bytes arrive."""
    data = b""
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
