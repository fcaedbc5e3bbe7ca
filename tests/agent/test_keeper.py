"""A keeper's memory outlives the ranks that fill it, is copied to a buddy, and is never wrong: real processes, real
sockets, kills in the middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from keepers import SECRET, KeeperProcess, Keepers, fill, manifest_of, read
from waiting import wait_until

from craton.agent import KeeperError
from craton.agent.memory import BLOCK_BYTES, HEADER_BYTES, KeeperClient, replicas
from craton.agent.memory import keeper as keeper_module
from craton.agent.memory.slots import receive_message, send_message

SIZE = 3 * 2**20


def data_of(step: int, size: int = SIZE) -> bytes:
    return bytes([step % 251]) * size


def save(client: KeeperClient, step: int, buddy: str | None = None, rank: int = 0, generation: int = 1) -> object:
    """A snapshot of a rank that keeps its newest one."""
    token, slots = client.reserve(rank, SIZE, generation)
    newest = max(slots, key=lambda slot: slot.step)
    (target, *_) = [slot for slot in slots if slot is not newest or newest.save is None]
    fill(target, data_of(step))
    for slot in slots:
        os.close(slot.descriptor)
    return client.filled(target.slot, token, manifest_of(step, SIZE, rank, generation), newest.save, buddy)


def test_what_a_rank_filled_is_there_when_the_rank_is_gone(keepers: Keepers) -> None:
    keeper = keepers.start("node-0")

    def rank() -> None:
        for step in (1, 2, 3):
            save(keeper.client(), step)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    client = keeper.client()
    held = {holding.manifest["step"]: holding for holding in client.holdings()}
    assert sorted(held) == [2, 3]
    for step, holding in held.items():
        assert holding.own
        assert read(client, holding.slot, SIZE) == data_of(step)
        assert holding.manifest["sums"] == [zlib.crc32(data_of(step))]
    assert client.status()["bytes"] == 2 * (HEADER_BYTES + SIZE)


def test_a_rank_that_dies_in_the_middle_of_filling_leaves_the_older_save(keepers: Keepers) -> None:
    keeper = keepers.start("node-0")
    client = keeper.client()
    save(client, 1)
    save(client, 2)

    def rank() -> None:
        _, slots = keeper.client().reserve(0, SIZE, 1)
        (older,) = [slot for slot in slots if slot.save == "1-1"]
        fill(older, data_of(3), whole=False)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert [holding.manifest["save"] for holding in client.holdings()] == ["1-2"]
    _, slots = client.reserve(0, SIZE, 2)
    assert sorted(slot.save or "" for slot in slots) == ["", "1-2"]


def test_blocks_are_summed_each(keepers: Keepers) -> None:
    client = keepers.start("node-0").client()
    size = 2 * BLOCK_BYTES + 77
    data = os.urandom(size)
    token, slots = client.reserve(0, size, 1)
    fill(slots[0], data)
    client.filled(slots[0].slot, token, manifest_of(1, size), None, None)
    (holding,) = client.holdings()
    expected = [zlib.crc32(data[begin : begin + BLOCK_BYTES]) for begin in range(0, size, BLOCK_BYTES)]
    assert holding.manifest["sums"] == expected
    assert len(expected) == 3


def test_the_buddy_has_a_copy_when_the_commit_is_answered(keepers: Keepers) -> None:
    first, second = keepers.start("node-0"), keepers.start("node-1")
    for step in (1, 2, 3, 4):
        committed = save(first.client(), step, second.address)
        assert (committed.replicated, committed.problem) == (True, None)
    first.kill()
    client = second.client()
    held = {holding.manifest["step"]: holding for holding in client.holdings()}
    assert sorted(held) == [3, 4]
    for step, holding in held.items():
        assert not holding.own
        assert read(client, holding.slot, SIZE) == data_of(step)


def test_the_copy_that_must_be_kept_is_not_overwritten(keepers: Keepers) -> None:
    """A rank that begins anew on another node has slots of its own, and the buddy's copies are all there is. Step 3 was
    not whole everywhere, so the generation began with step 2."""
    lost, buddy, spare = keepers.start("node-0"), keepers.start("node-1"), keepers.start("node-2")
    for step in (1, 2, 3):
        save(lost.client(), step, buddy.address)
    client = spare.client()
    token, slots = client.reserve(0, SIZE, 2)
    fill(slots[0], data_of(3))
    client.filled(slots[0].slot, token, manifest_of(3, SIZE, generation=2), "1-2", buddy.address)
    assert sorted(holding.manifest["save"] for holding in buddy.client().holdings()) == ["1-2", "2-3"]


def test_a_push_that_a_later_generation_has_overtaken_is_refused(keepers: Keepers) -> None:
    first, second, buddy = keepers.start("node-0"), keepers.start("node-1"), keepers.start("node-2")
    assert save(second.client(), 3, buddy.address, generation=2).replicated
    late = save(first.client(), 9, buddy.address, generation=1)
    assert not late.replicated
    assert "a later save of rank 0 is already here" in late.problem
    assert [holding.manifest["save"] for holding in buddy.client().holdings()] == ["2-3"]


def test_a_keeper_with_another_secret_gets_nothing_and_gives_nothing(
    keepers: Keepers, capfd: pytest.CaptureFixture[str]
) -> None:
    first, stranger = keepers.start("node-0"), keepers.start("node-1", secret=b"another run's")
    committed = save(first.client(), 1, stranger.address)
    assert not committed.replicated
    assert committed.problem is not None
    assert not stranger.client().holdings()
    assert [holding.manifest["step"] for holding in first.client().holdings()] == [1], "only the copy is lost"
    assert "the other keeper does not know the secret of this run" in capfd.readouterr().err


def is_closed_after(connection: socket.socket, garbage: bytes) -> bool:
    connection.settimeout(10)
    with suppress(ConnectionError):  # it may be closed before the last of it is sent or read
        connection.sendall(garbage)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    return True


def test_garbage_ends_its_connection_and_nothing_else(keepers: Keepers, capfd: pytest.CaptureFixture[str]) -> None:
    keeper = keepers.start("node-0")
    save(keeper.client(), 1)
    host, port = keeper.address.split(":")
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"\xff" * 4096):
        with socket.create_connection((host, int(port))) as connection:
            assert is_closed_after(connection, garbage)
    for garbage in (b"\xff" * 64, b"\x03" + bytes(7) + b"{]}", b"\x02" + bytes(7) + b"[]", bytes(3)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{keeper.name}")
            assert is_closed_after(connection, garbage)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{keeper.name}")
        for message in ({"verb": "dance"}, {}, {"verb": "open", "slot": "x"}, {"verb": "reserve", "rank": 1}):
            send_message(connection, message)
            received = receive_message(connection)
            assert received is not None
            assert "error" in received[0]
    token, slots = keeper.client().reserve(1, 8, 1)
    with pytest.raises(KeeperError, match="a manifest has no valid generation, step"):
        keeper.client().filled(slots[0].slot, token, {"rank": 1}, None, None)
    assert [holding.manifest["step"] for holding in keeper.client().holdings()] == [1]
    assert "a connection was closed" in capfd.readouterr().err


def test_a_dead_buddy_costs_the_copy_and_no_save(keepers: Keepers) -> None:
    first, second = keepers.start("node-0"), keepers.start("node-1")
    assert save(first.client(), 1, second.address).replicated
    second.kill()
    client = first.client()
    for step in (2, 3):
        committed = save(client, step, second.address)
        assert not committed.replicated
        assert f"no copy at the keeper {second.address}" in committed.problem
    assert "the next attempt is" in committed.problem
    assert sorted(holding.manifest["step"] for holding in client.holdings()) == [2, 3]
    assert client.status()["push_failures"] == 2


def test_a_buddy_that_stands_still_is_given_up(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(replicas, "PUSH_SECONDS", 0.6)
    first, second = keepers.start("node-0"), keepers.start("node-1")
    assert save(first.client(), 1, second.address).replicated
    os.kill(second.process.pid, signal.SIGSTOP)
    committed = save(first.client(), 2, second.address)
    os.kill(second.process.pid, signal.SIGCONT)
    assert not committed.replicated
    assert sorted(holding.manifest["step"] for holding in first.client().holdings()) == [1, 2]


def test_a_copy_cut_off_in_the_middle_is_none(keepers: Keepers) -> None:
    """The sender is killed while the bytes are on their way: what arrived of them does not count."""
    first, second = keepers.start("node-0"), keepers.start("node-1")
    size = 256 * 2**20
    client = first.client()
    token, slots = client.reserve(0, size, 1)
    killer = threading.Thread(target=_kill_during_push, args=(first, second.client()))
    killer.start()
    with pytest.raises(KeeperError, match=r"is gone|does not answer"):
        client.filled(slots[0].slot, token, manifest_of(1, size), None, second.address)
    killer.join()
    assert second.client().holdings() == []
    assert second.client().status()["copies_received"] == 1


def _kill_during_push(first: KeeperProcess, receiver: KeeperClient) -> None:
    while receiver.status()["copies_received"] == 0:
        pass
    first.kill()


def test_a_mount_without_room_is_told_with_what_to_do(small_disk: Path, keepers: Keepers) -> None:
    keeper = keepers.start("node-0", folder=str(small_disk))
    client = keeper.client()
    with pytest.raises(KeeperError, match=r"has no space for a slot of .* `mount -o remount,size=.* \{peer: off\}"):
        client.reserve(0, SIZE, 1)
    assert client.status()["bytes"] == 0, "what was taken before it was full is given back"
    for slot in client.reserve(0, 2**16, 1)[1]:
        os.close(slot.descriptor)
    roomy = keepers.start("node-1")
    committed = save(roomy.client(), 1, keeper.address)
    assert not committed.replicated
    assert "has no space for a slot" in committed.problem
    assert list(small_disk.iterdir()) == []


def test_a_later_process_of_a_rank_takes_its_slots_over(keepers: Keepers) -> None:
    client = keepers.start("node-0").client()
    token, slots = client.reserve(0, SIZE, 1)
    client.reserve(0, SIZE, 2)
    with pytest.raises(KeeperError, match="belongs to a later process of rank 0"):
        client.filled(slots[0].slot, token, manifest_of(1, SIZE), None, None)
    assert client.holdings() == []


def test_slots_of_older_generations_are_given_back(keepers: Keepers) -> None:
    first, second = keepers.start("node-0"), keepers.start("node-1")
    save(first.client(), 1, second.address, rank=0, generation=1)
    save(first.client(), 1, second.address, rank=1, generation=1)
    save(first.client(), 2, second.address, rank=0, generation=2)
    for keeper, own in ((first, True), (second, False)):
        client = keeper.client()
        assert client.free(2) > 0
        held = {(each.manifest["rank"], each.manifest["save"], each.own) for each in client.holdings()}
        assert (0, "2-2", own) in held
        assert not any(rank == 1 for rank, _, _ in held)


def test_descriptors_are_closed_once_they_are_sent(keepers: Keepers) -> None:
    keeper = keepers.start("node-0")
    client = keeper.client()
    save(client, 1)
    (held,) = client.holdings()
    folder = Path(f"/proc/{keeper.process.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(20):
        os.close(client.open(held.slot))
        for slot in client.reserve(0, SIZE, 1)[1]:
            os.close(slot.descriptor)
    # the last ones are closed after they were sent, perhaps a moment after they came
    wait_until(lambda: len(list(folder.iterdir())) == before, "they are closed")


def test_a_copy_that_arrives_while_others_are_freed_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot of the rank goes between the moment when room is found and the one when it is taken."""
    keeper = keeper_module.Keeper("node-0", SECRET, socket.socket(), socket.socket())

    class LateSlot(keeper_module.Slot):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            keeper._free(generation=9)

    monkeypatch.setattr(keeper_module, "Slot", LateSlot)
    manifest = manifest_of(1, SIZE, generation=9)
    copy = keeper._take_copy(manifest, None)
    copy.commit(manifest)
    copy.release()
    assert [each["manifest"] for each in keeper._holdings()[0]["holdings"]] == [manifest]
    keeper.close()


def test_an_abandoned_course_is_forgotten(keepers: Keepers) -> None:
    client = keepers.start("node-0").client()
    save(client, 8)
    save(client, 9)
    assert client.forget(after=8) == ["1-9"]
    assert [holding.manifest["save"] for holding in client.holdings()] == ["1-8"]
    assert client.forget(after=8, saves=["1-8"]) == ["1-8"]
    assert client.holdings() == []


def test_corrupt_flips_a_byte_of_the_newest_save(keepers: Keepers) -> None:
    first, second = keepers.start("node-0"), keepers.start("node-1")
    for step in (1, 2):
        save(first.client(), step, second.address)
    (told,) = first.client().corrupt(whose="own")
    assert told.endswith("of the slot of rank 0, save 1-2")
    assert first.client().corrupt(rank=5) == []
    for keeper, good in ((first, {1}), (second, {1, 2})):
        client = keeper.client()
        for holding in client.holdings():
            found = zlib.crc32(read(client, holding.slot, SIZE))
            assert (found == holding.manifest["sums"][0]) == (holding.manifest["step"] in good)


def test_a_keeper_that_is_gone_is_told_at_once(keepers: Keepers) -> None:
    keeper = keepers.start("node-0", SECRET)
    client = keeper.client()
    client.reserve(0, SIZE, 1)
    keeper.kill()
    with pytest.raises(KeeperError, match="the keeper of this node"):
        client.holdings()
    with pytest.raises(KeeperError, match="the keeper of this node does not answer"):
        client.holdings()
