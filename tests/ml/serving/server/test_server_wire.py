"""Messages between a front end and a Connection: whole ones only, of any size, and never waiting for a reader."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from scripted_engine import SECONDS
from waiting import wait_until

from craton.ml.serving.messages import Piece, Stats, Submit
from craton.ml.serving.server.wire import Wire

LONG = tuple(range(500_000))


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Connection]]:
    here, there = socket.socketpair()
    wire, connection = Wire(here.detach()), Connection(there.detach())
    yield wire, connection
    wire.close()
    connection.close()


def test_messages_arrive_as_they_were(ends: tuple[Wire, Connection]) -> None:
    wire, connection = ends
    assert list(wire.read()) == [], "nothing has come"
    replies = [[Piece(1, 0, [3], [-0.5]), Piece(2, finish="stop")], Stats(running=3)]
    for reply in replies:
        connection.send(reply)
    assert list(wire.read()) == replies
    wire.write(Submit(7, (1, 2)))
    assert connection.recv() == Submit(7, (1, 2))


def test_a_message_is_taken_once_it_is_whole(ends: tuple[Wire, Connection]) -> None:
    wire, connection = ends
    here, there = socket.socketpair()
    Connection(here.detach()).send({"a": 1})
    data = there.recv(1000)
    for cut in range(1, len(data)):
        os.write(connection.fileno(), data[:cut])
        assert list(wire.read()) == []
        os.write(connection.fileno(), data[cut:] + data)
        assert list(wire.read()) == [{"a": 1}, {"a": 1}]
    there.close()


def test_a_length_that_needs_more_room(ends: tuple[Wire, Connection]) -> None:
    """As Connection writes it for 2 GiB and more, which no test should send."""
    wire, connection = ends
    connection.send("x")
    payload = os.read(wire.fileno(), 1000)[4:]
    data = struct.pack("!i", -1) + struct.pack("!Q", len(payload)) + payload
    for letter in data[:-1]:
        os.write(connection.fileno(), bytes([letter]))
        assert list(wire.read()) == []
    os.write(connection.fileno(), data[-1:])
    assert list(wire.read()) == ["x"]


def test_long_messages_both_ways_at_once(ends: tuple[Wire, Connection]) -> None:
    """Both ends write before they read; since this end writes in a thread, it goes on reading."""
    wire, connection = ends
    received: list[object] = []

    def engine() -> None:
        connection.send(LONG)
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
    assert (found, received) == ([LONG], [Submit(1, LONG)])


def test_the_end_is_seen(ends: tuple[Wire, Connection]) -> None:
    wire, connection = ends
    connection.close()
    with pytest.raises(EOFError):
        list(wire.read())
    with pytest.raises(OSError, match="pipe"):
        wire.write("x")
