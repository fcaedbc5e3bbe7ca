"""Messages between a front end and a Connection: whole ones only, of any size, and never waiting for a reader."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import SECONDS
from waiting import wait_until

from craton.ml.serving.messages import Abort, Failed, OutputDelta, Stats, Submit
from craton.ml.serving.server.wire import Wire
from craton.ml.serving.wire import MessageLine, WireError, encode

LONG = tuple(range(500_000))


@pytest.fixture
def ends() -> Iterator[tuple[Wire, MessageLine]]:
    here, there = socket.socketpair()
    wire, connection = Wire(here.detach()), MessageLine(Connection(there.detach()))
    yield wire, connection
    wire.close()
    connection.close()


def test_messages_arrive_as_they_were(ends: tuple[Wire, MessageLine]) -> None:
    wire, connection = ends
    assert list(wire.read()) == [], "nothing has come"
    replies = [[OutputDelta(1, 0, [3], [-0.5]), OutputDelta(2, finish="stop")], Stats(running=3)]
    for reply in replies:
        connection.send(reply)
    assert list(wire.read()) == replies
    wire.write(Submit(7, (1, 2)))
    assert connection.recv() == Submit(7, (1, 2))


def test_a_message_is_taken_once_it_is_whole(ends: tuple[Wire, MessageLine]) -> None:
    wire, connection = ends
    payload = encode(Abort(1, 2))
    data = struct.pack("!i", len(payload)) + payload
    for cut in range(1, len(data)):
        os.write(connection.fileno(), data[:cut])
        assert list(wire.read()) == []
        os.write(connection.fileno(), data[cut:] + data)
        assert list(wire.read()) == [Abort(1, 2), Abort(1, 2)]


def test_a_length_that_needs_more_room(ends: tuple[Wire, MessageLine]) -> None:
    """As Connection writes it for 2 GiB and more, which no test should send."""
    wire, connection = ends
    payload = encode(Failed("x"))
    data = struct.pack("!i", -1) + struct.pack("!Q", len(payload)) + payload
    for letter in data[:-1]:
        os.write(connection.fileno(), bytes([letter]))
        assert list(wire.read()) == []
    os.write(connection.fileno(), data[-1:])
    assert list(wire.read()) == [Failed("x")]


@pytest.mark.parametrize("head", [struct.pack("!i", -7), struct.pack("!iQ", -1, 2**40), struct.pack("!i", 2**31 - 1)])
def test_nothing_is_kept_for_a_message_that_is_too_long(ends: tuple[Wire, MessageLine], head: bytes) -> None:
    wire, connection = ends
    os.write(connection.fileno(), head)
    with pytest.raises(WireError, match="exceeds the limit"):
        list(wire.read())


def test_a_pickle_is_not_a_message(ends: tuple[Wire, MessageLine], tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    wire, connection = ends
    payload = pickle.dumps(Attack())
    os.write(connection.fileno(), struct.pack("!i", len(payload)) + payload)
    with pytest.raises(WireError):
        list(wire.read())
    wire.write(Abort(1))
    assert connection.recv() == Abort(1)
    os.write(wire.fileno(), struct.pack("!i", len(payload)) + payload)
    with pytest.raises(WireError):
        connection.recv()
    assert not list(tmp_path.iterdir())


def test_long_messages_both_ways_at_once(ends: tuple[Wire, MessageLine]) -> None:
    """Both ends write before they read; since this end writes in a thread, it goes on reading."""
    wire, connection = ends
    received: list[object] = []

    def engine() -> None:
        connection.send(Submit(2, LONG))
        received.append(connection.recv())

    threads = [threading.Thread(target=engine), threading.Thread(target=wire.write, args=(Submit(1, LONG),))]
    for thread in threads:
        thread.start()
    found: list[object] = []

    def has_come() -> bool:
        found.extend(wire.read())
        return bool(found)

    wait_until(has_come)
    for thread in threads:
        thread.join(SECONDS)
    assert (found, received) == ([Submit(2, LONG)], [Submit(1, LONG)])


def test_the_end_is_seen(ends: tuple[Wire, MessageLine]) -> None:
    wire, connection = ends
    connection.close()
    with pytest.raises(EOFError):
        list(wire.read())
    with pytest.raises(OSError, match="pipe"):
        wire.write(Abort(1))
