"""Slots: shared memory that outlives the process that fills it, and the client of the keeper that holds it.

A slot is an unnamed file in a shared-memory mount, so it disappears with the last process that has it open, however
that process ends. Its first page is a header: a number that the keeper writes when it commits the slot, and that a rank
sets to zero before it changes the first byte. So a rank that dies half-way leaves a slot that the keeper knows to be
invalid, and no request is needed before it is filled.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from craton.agent.errors import KeeperError

HEADER_BYTES = mmap.PAGESIZE  # of a slot, before its data
BLOCK_BYTES = 8 * 2**20  # of a slot's data, each with its own crc32
MESSAGE_BYTES = 2**30  # more than any valid message has
ANSWER_SECONDS = 300.0  # a commit waits up to PUSH_SECONDS for a buddy; after this time the keeper hangs

_LENGTH = struct.Struct("<Q")
_DESCRIPTORS = 8


def shared_memory_folder() -> str:
    """Return the mount in which slots are created."""
    return os.environ.get("CRATON_SHARED_MEMORY") or "/dev/shm"


def make_memory(folder: str, num_bytes: int) -> int:
    """Create a slot for this many bytes of data and return its descriptor; KeeperError if there is no space."""
    size = HEADER_BYTES + num_bytes
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeeperError(
            f"cannot create a slot in {folder}: {error.strerror}; set CRATON_SHARED_MEMORY to a tmpfs mount, or switch "
            "peer memory off with checkpoint: {peer: off}"
        ) from error
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.ENOSPC:
            raise KeeperError(f"cannot create a slot of {size:,} bytes in {folder}: {error.strerror}") from error
        raise KeeperError(
            f"{folder} has no space for a slot of {size:,} bytes; enlarge the mount with `mount -o remount,size=... "
            f"{folder}`, or switch peer memory off with checkpoint: {{peer: off}}"
        ) from error
    return descriptor


@dataclass(frozen=True)
class OwnSlot:
    """A slot that this rank may fill, and the complete save it holds (None: no complete one)."""

    slot: int
    descriptor: int
    save: str | None
    step: int


@dataclass(frozen=True)
class Holding:
    """A complete save of one rank in the keeper's memory: of a rank of this node, or a copy from another node."""

    slot: int
    own: bool
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Committed:
    """The result of a commit. `problem` says why there is no copy at the buddy."""

    replicated: bool
    problem: str | None
    seconds: float


class KeeperClient:
    """One connection to a node's keeper, by its abstract socket name. Thread-safe; calls are serialized."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def reserve(self, rank: int, num_bytes: int, generation: int) -> tuple[str, tuple[OwnSlot, ...]]:
        """Reserve this rank's two slots for this process; pass the returned token to `filled`. A commit of an earlier
        process of this rank completes first."""
        answer, descriptors = self._ask("reserve", rank=rank, bytes=num_bytes, generation=generation)
        slots = zip(answer["slots"], descriptors, strict=True)
        return answer["token"], tuple(OwnSlot(descriptor=descriptor, **slot) for slot, descriptor in slots)

    def filled(
        self, slot: int, token: str, manifest: Mapping[str, Any], keep: str | None, buddy: str | None
    ) -> Committed:
        """Commit a slot and copy it to the keeper at `buddy`, which may overwrite any save of this rank except `keep`.
        The manifest must have rank, generation, step, save, course, base and bytes."""
        answer, _ = self._ask("filled", slot=slot, token=token, manifest=dict(manifest), keep=keep, buddy=buddy)
        return Committed(answer["replicated"], answer["problem"], answer["seconds"])

    def holdings(self) -> list[Holding]:
        """Return all complete saves here."""
        return [Holding(**entry) for entry in self._ask("holdings")[0]["holdings"]]

    def open(self, slot: int) -> int:
        """Return a descriptor to read a slot."""
        _, (descriptor,) = self._ask("open", slot=slot)
        return descriptor

    def give_back(self, token: str) -> int:
        """Free the slots of a reservation that hold no complete save; return the freed bytes."""
        return int(self._ask("give_back", token=token)[0]["bytes"])

    def free(self, generation: int) -> int:
        """Free the slots of older generations; return the freed bytes."""
        return int(self._ask("free", generation=generation)[0]["bytes"])

    def forget(self, after: int, saves: Sequence[str] = ()) -> list[str]:
        """Invalidate saves of steps after this one, and the named ones; return which there were."""
        return list(self._ask("forget", after=after, saves=list(saves))[0]["forgotten"])

    def corrupt(self, rank: int | None = None, whose: str = "all") -> list[str]:
        """Flip a bit in the newest save of each rank (or of one): `own`, `copies` or `all`; return what was done."""
        return list(self._ask("corrupt", rank=rank, whose=whose)[0]["done"])

    def status(self) -> dict[str, Any]:
        """Return counters for metrics."""
        return self._ask("status")[0]

    def interrupt(self) -> None:
        """Make a pending call in another thread fail at once; the keeper still completes the request."""
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _ask(self, verb: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                if self._socket is None:
                    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    self._socket.settimeout(ANSWER_SECONDS)
                    self._socket.connect(f"\0{self.address}")
                send_message(self._socket, {"verb": verb, **fields})
                received = receive_message(self._socket, _DESCRIPTORS)
            except (OSError, ValueError) as error:
                self._disconnect()
                raise KeeperError(f"the keeper of this node does not answer ({error}); its memory is lost") from error
            if received is None:
                self._disconnect()
                raise KeeperError("the keeper of this node is gone; its memory is lost")
        answer, descriptors = received
        if "error" in answer:
            raise KeeperError(answer["error"])
        return answer, descriptors

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def send_message(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a length, which carries the descriptors, and JSON."""
    body = json.dumps(message).encode()
    length = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(connection, [length], list(descriptors))
    else:
        connection.sendall(length)
    connection.sendall(body)


def receive_message(
    connection: socket.socket, max_descriptors: int = 0, max_bytes: int = MESSAGE_BYTES
) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors; None if the other side has closed; ValueError if it is invalid."""
    descriptors: list[int] = []
    if max_descriptors:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, max_descriptors)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
    else:
        head = connection.recv(_LENGTH.size)
    if not head:
        return None
    head += receive_exactly(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"message length {length:,} exceeds the limit of {max_bytes:,} bytes")
    message = json.loads(receive_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message is not a JSON object")
    return message, descriptors


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the view; ConnectionError if the other side closes first."""
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed in the middle of a message")
        view = view[count:]
