"""Agents speak only to those that know the run's secret, and believe only what was said to them, in order."""

from __future__ import annotations

import contextlib
import hmac
import multiprocessing
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from waiting import PATIENCE_SECONDS

from craton.agent import LaunchError
from craton.agent.coordination import Link, run_secret, wire
from craton.agent.coordination.wire import GREETING, MAX_FRAME_BYTES, Listener, dial
from craton.telemetry import RunDirectory

SECRET = b"the secret of this run"


class Agent:
    """Listens, and hands out the links of those that dialed."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self._links: Queue[Link] = Queue()
        self._listener = Listener("127.0.0.1", secret, self._links.put)
        self.address = f"127.0.0.1:{self._listener.port}"

    def link(self) -> Link:
        return self._links.get(timeout=PATIENCE_SECONDS)

    @property
    def was_reached(self) -> bool:
        return not self._links.empty()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def pair(agent: Agent) -> Iterator[tuple[Link, Link]]:
    """Both ends of a link: who dialed, who listened."""
    dialed = dial(agent.address, SECRET)
    assert dialed is not None
    listened = agent.link()
    yield dialed, listened
    dialed.close()
    listened.close()


class Tap:
    """A machine between two agents that sees, keeps and repeats what they say."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._target = (host, int(port))
        self.seen = {"forth": b"", "back": b""}
        self._ready = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self._near, _ = self._server.accept()
        self._far = socket.create_connection(self._target)
        self._ready.set()
        for source, sink, way in ((self._near, self._far, "forth"), (self._far, self._near, "back")):
            threading.Thread(target=self._pass_on, args=(source, sink, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen[way] += data
                sink.sendall(data)

    def inject(self, data: bytes) -> None:
        """Bytes for who listens, as if they came from who dialed."""
        assert self._ready.wait(PATIENCE_SECONDS)
        self._far.sendall(data)

    def close(self) -> None:
        for each in (self._server, self._near, self._far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def tapped(agent: Agent) -> Iterator[tuple[Link, Link, Tap]]:
    tap = Tap(agent.address)
    dialed = dial(tap.address, SECRET)
    assert dialed is not None
    listened = agent.link()
    yield dialed, listened, tap
    for each in (dialed, listened, tap):
        each.close()


def test_both_sides_speak_and_hear_in_order(pair: tuple[Link, Link]) -> None:
    dialed, listened = pair
    for number in range(50):
        assert dialed.send({"is": "status", "number": number})
        assert listened.send({"is": "beat", "number": -number, "text": "x" * number * 1000})
    for number in range(50):
        assert listened.receive() == {"is": "status", "number": number}
        assert dialed.receive() == {"is": "beat", "number": -number, "text": "x" * number * 1000}


def test_words_of_several_threads_do_not_mix(pair: tuple[Link, Link]) -> None:
    dialed, listened = pair

    def talk(name: str) -> None:
        for _ in range(50):
            dialed.send({"name": name * 5000})

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    heard = [listened.receive() for _ in range(150)]
    for thread in threads:
        thread.join()
    assert sorted(message["name"][0] for message in heard if message) == sorted("abc" * 50)


def test_who_does_not_know_the_secret_is_not_heard(agent: Agent) -> None:
    assert dial(agent.address, b"the secret of another run") is None
    impostor = Agent(b"the secret of another run")
    assert dial(impostor.address, SECRET) is None
    impostor.close()
    assert not agent.was_reached
    assert dial(agent.address, SECRET) is not None


def test_an_agent_proves_nothing_to_its_own_reflection(agent: Agent) -> None:
    """Who only sends back what it is sent, the nonce and then the proof, gets no link."""
    host, _, port = agent.address.rpartition(":")
    with socket.create_connection((host, int(port))) as mirror:
        mirror.settimeout(PATIENCE_SECONDS)
        while data := mirror.recv(4096):
            mirror.sendall(data)
    assert not agent.was_reached


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:no", "nowhere", ""])
def test_nobody_there(address: str) -> None:
    assert dial(address, SECRET, 1.0) is None


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(40), GREETING + bytes(80), b"\xff" * 4096])
def test_garbage_instead_of_a_greeting_is_refused(agent: Agent, garbage: bytes) -> None:
    host, _, port = agent.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(OSError):  # the agent may have hung up already
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert not agent.was_reached
    assert dial(agent.address, SECRET) is not None, "others are still heard"


def test_one_who_says_nothing_keeps_nobody_waiting(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
    host, _, port = agent.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        assert dial(agent.address, SECRET) is not None
        silent.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(4096):
                pass
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert dial(f"127.0.0.1:{mute.getsockname()[1]}", SECRET) is None


def frame(text: bytes, mac: bytes) -> bytes:
    return struct.pack(">I", len(text)) + mac + text


@pytest.mark.parametrize(
    "data",
    [
        frame(b'{"is":"finish"}', bytes(32)),
        frame(b'{"is":"finish"}', hmac.digest(SECRET, b'{"is":"finish"}', "sha256")),  # without nonces and number
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        b"\xff" * 5000,
    ],
    ids=["unsigned", "signed for no link", "huge", "garbage"],
)
def test_a_forged_frame_ends_the_link(tapped: tuple[Link, Link, Tap], data: bytes) -> None:
    dialed, listened, tap = tapped
    dialed.send({"is": "status"})
    assert listened.receive() == {"is": "status"}
    tap.inject(data)
    assert listened.receive() is None
    assert not listened.is_open


@pytest.mark.parametrize("way", ["forth", "back"], ids=["in its own direction", "in the other one"])
def test_a_frame_that_is_repeated_ends_the_link(tapped: tuple[Link, Link, Tap], way: str) -> None:
    dialed, listened, tap = tapped
    sender, receiver = (dialed, listened) if way == "forth" else (listened, dialed)
    shaken = len(tap.seen[way])
    sender.send({"is": "fault"})
    assert receiver.receive() == {"is": "fault"}
    tap.inject(tap.seen[way][shaken:])
    assert listened.receive() is None


def test_a_conversation_cannot_be_repeated_to_another_link(agent: Agent, tapped: tuple[Link, Link, Tap]) -> None:
    dialed, listened, tap = tapped
    dialed.send({"is": "status"})
    assert listened.receive() is not None
    host, _, port = agent.address.rpartition(":")
    with socket.create_connection((host, int(port))) as again:
        again.settimeout(PATIENCE_SECONDS)
        again.sendall(tap.seen["forth"])
        with contextlib.suppress(ConnectionResetError):
            while again.recv(4096):
                pass
    assert not agent.was_reached


def test_a_torn_frame_is_none(tapped: tuple[Link, Link, Tap]) -> None:
    dialed, listened, tap = tapped
    tap.inject(struct.pack(">I", 100) + bytes(32) + b'{"is":')
    dialed.close()
    tap.close()
    assert listened.receive() is None


def test_an_end_that_is_closed_is_noticed(pair: tuple[Link, Link]) -> None:
    dialed, listened = pair
    heard: Queue[object] = Queue()
    reader = threading.Thread(target=lambda: heard.put(dialed.receive()))
    reader.start()
    listened.close()
    assert heard.get(timeout=PATIENCE_SECONDS) is None
    reader.join()
    assert not dialed.send({"is": "status"})
    assert not listened.send({"is": "beat"})


def test_a_link_may_be_closed_by_another_thread_than_reads_it(pair: tuple[Link, Link]) -> None:
    heard: Queue[object] = Queue()
    reader = threading.Thread(target=lambda: heard.put(pair[0].receive()))
    reader.start()
    pair[0].close()
    assert heard.get(timeout=PATIENCE_SECONDS) is None
    reader.join()


def test_a_peer_that_does_not_read_ends_the_link_and_not_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SEND_SECONDS", 0.5)
    dialed = dial(agent.address, SECRET)
    assert dialed is not None
    stuck = agent.link()
    message = {"text": "x" * 2**20}
    assert any(not dialed.send(message) for _ in range(100)), "all of it was taken, though nobody reads"
    assert not dialed.is_open
    stuck.close()


def test_a_message_that_is_no_object_ends_the_link(pair: tuple[Link, Link]) -> None:
    dialed, listened = pair
    dialed.send([1, 2])  # type: ignore[arg-type]
    assert listened.receive() is None


def test_all_agents_of_a_run_find_the_same_secret(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    context = multiprocessing.get_context("fork")
    ready, found = context.Barrier(4), context.SimpleQueue()

    def look() -> None:
        ready.wait()
        found.put(run_secret(run))

    agents = [context.Process(target=look) for _ in range(4)]
    for agent in agents:
        agent.start()
    secrets = {found.get() for _ in agents}
    for agent in agents:
        agent.join()
    assert secrets == {run_secret(run)}
    assert len(secrets.pop()) == 64
    assert stat.S_IMODE(run.secret_path.stat().st_mode) == 0o600
    assert [path.name for path in run.path.iterdir() if "secret" in path.name] == ["secret"]


@pytest.mark.parametrize("held", [b"", b"\n", b"ab12"])
def test_a_secret_that_is_empty_or_too_short_is_refused_and_kept(tmp_path: Path, held: bytes) -> None:
    run = RunDirectory.create(tmp_path, "run")
    run.secret_path.write_bytes(held)
    with pytest.raises(
        LaunchError, match="remove it while the run is stopped, then `craton resume run` creates a new one"
    ):
        run_secret(run)
    assert run.secret_path.read_bytes() == held


def test_on_a_full_disk_no_secret_is_made_and_nothing_is_left(small_disk: Path) -> None:
    run = RunDirectory.create(small_disk, "run")
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    with pytest.raises(OSError, match="No space left"):
        run_secret(run)
    assert [path.name for path in run.path.iterdir() if "secret" in path.name] == []
    filler.unlink()
    assert len(run_secret(run)) == 64
