"""Idle connections of strangers: at an agent, at a keeper and at the metrics of a node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from keepers import SECRET, Keepers, fill, keepers, manifest_of
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.coordination import Link, Strangers
from craton.agent.coordination.wire import MAX_STRANGERS, Listener, dial
from craton.telemetry.node import MetricsEndpoint, endpoint

__all__ = ["keepers"]

IDLE = 300


@contextmanager
def idle_connections(port: int, count: int = IDLE) -> Iterator[None]:
    with ExitStack() as held:
        for _ in range(count):
            held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
        yield


def test_the_oldest_stranger_leaves_when_there_are_too_many() -> None:
    strangers = Strangers(limit=2)
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, theirs in pairs:
        theirs.settimeout(PATIENCE_SECONDS)
        strangers.add(ours)
    assert pairs[0][1].recv(1) == b"", "the first one is shut down"
    assert len(strangers) == 2
    strangers.remove(pairs[1][0])
    strangers.add(pairs[0][0])
    for ours, theirs in pairs[1:]:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x", "the others are not"
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_an_agent_answers_beside_idle_strangers() -> None:
    welcomed: list[Link] = []
    is_welcome = threading.Event()

    def welcome(link: Link) -> None:
        welcomed.append(link)
        is_welcome.set()

    listener = Listener("127.0.0.1", SECRET, welcome)
    try:
        with idle_connections(listener.port):
            link = dial(f"127.0.0.1:{listener.port}", SECRET, PATIENCE_SECONDS)
            assert link is not None
            assert is_welcome.wait(PATIENCE_SECONDS)
            assert len(listener._strangers) <= MAX_STRANGERS
            assert link.send({"is": "who"})
            assert welcomed[0].receive(PATIENCE_SECONDS) == {"is": "who"}
            link.close()
    finally:
        listener.close()


def test_a_keeper_takes_copies_beside_idle_strangers(keepers: Keepers) -> None:
    here, there = keepers.start("node-0"), keepers.start("node-1")
    with idle_connections(int(there.address.rpartition(":")[2])):
        client = here.client()
        token, slots = client.reserve(0, 8, 1)
        fill(slots[0], b"12345678")
        committed = client.filled(slots[0].slot, token, manifest_of(1, 8), None, there.address)
        assert committed.problem is None
        assert committed.replicated


def is_served(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False


def test_metrics_are_served_again_when_idle_strangers_were_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 8)
    served = MetricsEndpoint("run", "node-0")
    port = served.serve(0, "127.0.0.1")
    try:
        threads = threading.active_count()
        with idle_connections(port, endpoint.MAX_CONNECTIONS + 10):
            assert threading.active_count() <= threads + endpoint.MAX_CONNECTIONS
            wait_until(lambda: is_served(port), "the metrics are served")
    finally:
        served.close()
