"""The rendezvous store: what clients with the secret can do, and what everybody else cannot."""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from craton.agent.store import StoreClient, StoreError, StoreServer, StoreTimeoutError
from craton.agent.store import server as server_module
from craton.agent.store.wire import GREETING, HELLO_BYTES, MAC_BYTES, NONCE_BYTES, StoreSession

SECRET = b"the secret of this run"
LIMIT_SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1", SECRET).start()
    yield made
    made.close()


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    made = StoreClient(server.address, SECRET, LIMIT_SECONDS)
    yield made
    made.close()


def dial(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), LIMIT_SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server has closed it; what the server sent before does not count."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_values_are_set_read_counted_and_deleted(client: StoreClient) -> None:
    client.set(["a", "b"], [b"1", bytes(range(256))])
    assert client.get(["b", "a"], LIMIT_SECONDS) == [bytes(range(256)), b"1"]
    assert client.check(["a", "b"])
    assert not client.check(["a", "c"])
    assert client.count() == 2
    assert client.delete("a")
    assert not client.delete("a")
    client.append("b", b"end")
    assert client.get(["b"], LIMIT_SECONDS) == [bytes(range(256)) + b"end"]


def test_numbers_are_added(client: StoreClient) -> None:
    assert [client.add("n", amount) for amount in (3, 4, -10)] == [3, 7, -3]
    assert client.get(["n"], LIMIT_SECONDS) == [b"-3"]
    client.set(["word"], [b"abc"])
    with pytest.raises(StoreError, match="refused: add: invalid literal"):
        client.add("word", 1)
    assert client.add("n", 0) == -3, "the connection is still of use"


def test_a_wait_ends_when_the_last_key_is_set(server: StoreServer, client: StoreClient) -> None:
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(client.get(["x", "y"], LIMIT_SECONDS)))
    thread.start()
    client.set(["x"], [b"1"])  # over another connection, for the first one waits
    assert not found
    client.set(["y"], [b"2"])
    thread.join(LIMIT_SECONDS)
    assert found == [[b"1", b"2"]]
    with pytest.raises(StoreTimeoutError, match=r"`wait never` within 50 ms"):
        client.wait(["never"], 0.05)
    assert eventually(lambda: not server._waiting), "nobody waits any more"


def test_a_client_that_is_cut_off_fails_at_once_and_for_good(server: StoreServer, client: StoreClient) -> None:
    failed: list[StoreError] = []

    def wait() -> None:
        try:
            client.wait(["never"], LIMIT_SECONDS)
        except StoreError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: bool(server._waiting))
    for name in os.listdir("/proc/self/fd"):  # as a rank does whose generation is over
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername()[1] == server.port:
                connection.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT_SECONDS)
    assert [str(error).rpartition(" ended: ")[2] for error in failed] == ["the other side closed it"]
    with pytest.raises(StoreError, match="ended: the other side closed it"):
        client.set(["key"], [b"value"])
    assert StoreClient(server.address, SECRET, LIMIT_SECONDS).count() == 0


def test_a_value_of_megabytes_arrives_whole(client: StoreClient) -> None:
    value = secrets.token_bytes(3 << 20)
    client.set(["large"], [value])
    assert client.get(["large"], LIMIT_SECONDS) == [value]


def test_another_secret_gets_nothing(server: StoreServer, client: StoreClient) -> None:
    client.set(["key"], [b"value"])
    with pytest.raises(StoreError, match="cannot be reached with the secret of this run"):
        StoreClient(server.address, b"another secret", 0.0)
    assert client.get(["key"], LIMIT_SECONDS) == [b"value"]


def test_a_server_without_the_secret_is_not_believed() -> None:
    impostor = StoreServer("127.0.0.1", b"another secret").start()
    try:
        with pytest.raises(StoreError, match="cannot be reached"):
            StoreClient(impostor.address, SECRET, 0.0)
    finally:
        impostor.close()


def _tcpstore_hello() -> bytes:
    return struct.pack("<BI", 0, 0x3C85F7CE)  # VALIDATE and torch's magic number


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        _tcpstore_hello(),
        GREETING + bytes(NONCE_BYTES + MAC_BYTES),  # no proof
        random.Random(0).randbytes(4096),
    ],
    ids=["http", "zeros", "TCPStore", "no proof", "noise"],
)
def test_strangers_are_closed_and_disturb_nobody(server: StoreServer, client: StoreClient, words: bytes) -> None:
    client.set(["key"], [b"value"])
    with dial(server) as stranger:
        stranger.sendall(words)
        assert is_closed(stranger)
    assert client.get(["key"], LIMIT_SECONDS) == [b"value"]
    assert client.count() == 1


def test_half_a_greeting_is_closed_in_time(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.2)
    for words in (b"", GREETING[:3], GREETING + bytes(NONCE_BYTES)):
        with dial(server) as stranger:
            stranger.sendall(words)
            assert is_closed(stranger)
    client.set(["key"], [b"value"])


def test_a_recorded_connection_cannot_be_replayed(server: StoreServer, client: StoreClient) -> None:
    def converse(words: bytes) -> tuple[bytes, bytes]:
        with dial(server) as connection:
            connection.sendall(words[:HELLO_BYTES])
            hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
            if len(words) == HELLO_BYTES:
                session = StoreSession(SECRET, words[len(GREETING) :], hello[len(GREETING) :], is_client=True)
                words += session.own_proof + session.frame([b"add", b"n", b"1"])
            connection.sendall(words[HELLO_BYTES:])
            connection.shutdown(socket.SHUT_WR)
            return words, connection.recv(MAC_BYTES, socket.MSG_WAITALL)

    words, proof = converse(GREETING + secrets.token_bytes(NONCE_BYTES))
    assert len(proof) == MAC_BYTES
    assert client.get(["n"], LIMIT_SECONDS) == [b"1"]
    assert converse(words)[1] == b"", "the server chose another nonce"
    assert client.get(["n"], LIMIT_SECONDS) == [b"1"]


def test_a_changed_or_repeated_frame_ends_its_connection(server: StoreServer, client: StoreClient) -> None:
    for spoil in (lambda frame: frame[:-1] + b"2", lambda frame: frame + frame):
        with dial(server) as connection:
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(GREETING + nonce)
            hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
            session = StoreSession(SECRET, nonce, hello[len(GREETING) :], is_client=True)
            connection.sendall(session.own_proof + spoil(session.frame([b"add", b"n", b"1"])))
            assert is_closed(connection)
    assert client.get(["n"], LIMIT_SECONDS) == [b"1"], "the first of the repeated frames counts once"


def test_three_hundred_idle_strangers_keep_nobody_out(server: StoreServer) -> None:
    with ExitStack() as held:
        for _ in range(300):
            held.enter_context(dial(server))
        one = StoreClient(server.address, SECRET, LIMIT_SECONDS)
        one.set(["key"], [b"value"])
        assert one.get(["key"], LIMIT_SECONDS) == [b"value"]
        assert len(server._strangers) <= server_module.MAX_STRANGERS
        one.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_gets_nothing(server: StoreServer, client: StoreClient, tmp_path: Path) -> None:
    """Who cannot read the secret's file: a TCPStore client and one of Craton's own, with a guessed secret."""
    client.set(["key"], [b"value"])
    secret = tmp_path / "secret"
    secret.touch(0o600)
    program = f"""
import encodings.idna, os, socket, sys  # the first one may not be readable later on
os.setgid(65534); os.setuid(65534)
try:
    open({str(secret)!r})
    sys.exit("the secret can be read")
except PermissionError:
    pass
for words in ({_tcpstore_hello()!r}, {GREETING + bytes(NONCE_BYTES + MAC_BYTES)!r}):
    with socket.create_connection(("127.0.0.1", {server.port})) as connection:
        connection.sendall(words)
        try:
            answer = connection.recv(1 << 16, socket.MSG_WAITALL)
        except ConnectionResetError:
            answer = b""
        assert b"value" not in answer, answer
print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.stdout == "refused\n", done.stderr
    assert client.count() == 1
