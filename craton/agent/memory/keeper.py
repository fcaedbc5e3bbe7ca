"""The keeper: one process per node that outlives its ranks and holds their state in memory.

Ranks fill slots of shared memory and notify the keeper. It computes a checksum of every block, commits, and copies the
slot to the keeper of another node, all in parallel to training. A slot is valid only while its header holds the number
that the keeper wrote, so a process that dies in the middle leaves an older save or none, never a mixed one. A bad
message or a dead peer ends only its own connection. Needs only the standard library, not torch.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from craton.agent.coordination import Strangers
from craton.agent.errors import KeeperError
from craton.agent.memory.replicas import STALL_SECONDS, Buddies, close_quietly, receive_copies
from craton.agent.memory.slots import (
    BLOCK_BYTES,
    HEADER_BYTES,
    make_memory,
    receive_message,
    send_message,
    shared_memory_folder,
)

MAX_SUMMING_THREADS = 64  # crc32 runs at 2 GB/s per thread
SLOTS_EACH = 2  # one is complete while the other is filled

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_HEADER = struct.Struct("<Q")
_NEEDED = {"rank": int, "generation": int, "step": int, "save": str, "course": list, "base": int, "bytes": int}

Answer = tuple[dict[str, Any], tuple[int, ...]]  # with descriptors that are closed once sent


class Slot:
    """Memory for one save of one rank."""

    def __init__(self, number: int, rank: int, num_bytes: int, own: bool, folder: str) -> None:
        self.number, self.rank, self.bytes, self.own = number, rank, num_bytes, own
        self.descriptor = make_memory(folder, num_bytes)
        try:
            self.memory = mmap.mmap(self.descriptor, HEADER_BYTES + num_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise KeeperError(f"cannot map a slot of {num_bytes:,} bytes: {error.strerror}") from error
        self.manifest: dict[str, Any] = {}
        self.generation = 0  # the last one that used it
        self.token = ""  # of the process that may fill it
        self.lock = threading.Lock()  # held during a commit or while a copy arrives
        self._committed = 0

    @property
    def is_whole(self) -> bool:
        return self._committed != 0 and _HEADER.unpack_from(self.memory)[0] == self._committed

    @property
    def save(self) -> str | None:
        return str(self.manifest["save"]) if self.is_whole else None

    @property
    def age(self) -> tuple[bool, list[int], int]:
        """Sort key by age; a slot without a complete save is the oldest."""
        return (True, self.manifest["course"], self.manifest["step"]) if self.is_whole else (False, [], 0)

    def data(self) -> memoryview:
        return memoryview(self.memory)[HEADER_BYTES:]

    def invalidate(self) -> None:
        self._committed = 0
        _HEADER.pack_into(self.memory, 0, 0)

    def commit(self, manifest: dict[str, Any]) -> None:
        self.manifest, self.generation = manifest, manifest["generation"]
        self._committed = secrets.randbits(63) | 1
        _HEADER.pack_into(self.memory, 0, self._committed)

    def release(self) -> None:
        self.lock.release()

    def close(self) -> None:
        """Close the slot; its memory is freed once no process maps it."""
        self._committed = 0
        os.close(self.descriptor)


class Keeper:
    """Serves two sockets: an abstract Unix socket for this node's processes, a TCP socket for other keepers."""

    def __init__(
        self, node: str, secret: bytes, control: socket.socket, peers: socket.socket, folder: str | None = None
    ) -> None:
        self.node, self.folder = node, folder or shared_memory_folder()
        self._secret, self._control, self._peers = secret, control, peers
        self._lock = threading.Lock()  # guards the lists of slots; not held during transfers
        self._slots: dict[tuple[bool, int, int], list[Slot]] = {}  # by own, rank and size
        self._numbers = itertools.count(1)
        self._buddies = Buddies(secret)
        threads = min(MAX_SUMMING_THREADS, len(os.sched_getaffinity(0)))
        self._summing = ThreadPoolExecutor(threads, thread_name_prefix="sums")
        self._connections: set[socket.socket] = set()
        self._strangers = Strangers()
        self._refused = 0
        self._closed = False
        self._counts: dict[str, float] = {"commits": 0, "pushes": 0, "push_failures": 0, "copies_received": 0}
        self._counts |= {"last_commit_seconds": 0.0, "last_push_seconds": 0.0}
        self._verbs: dict[str, Callable[..., Answer]] = {
            "reserve": self._reserve,
            "filled": self._filled,
            "holdings": self._holdings,
            "open": self._open,
            "give_back": self._give_back,
            "free": self._free,
            "forget": self._forget,
            "corrupt": self._corrupt,
            "status": self._status,
        }

    def serve_forever(self) -> None:
        """Serve until `close`, or until the process ends."""
        thread = threading.Thread(target=self._accept, args=(self._peers, self._serve_keeper), daemon=True)
        thread.start()
        self._accept(self._control, self._serve_process)

    def close(self) -> None:
        """Close every connection and free all memory."""
        self._closed = True
        for item in (self._control, self._peers, *self._connections):
            close_quietly(item)
        self._buddies.close()
        self._summing.shutdown(wait=False)
        with self._lock:
            for slot in self._all():
                slot.close()
            self._slots.clear()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while not self._closed:
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if not self._closed:  # e.g. out of descriptors, which is temporary
                    self._log(f"cannot accept a connection: {error}")
                    time.sleep(0.1)
                continue
            threading.Thread(target=self._guarded, args=(connection, serve), daemon=True).start()

    def _guarded(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._connections.add(connection)
        try:
            serve(connection)
        except Exception as error:  # noqa: BLE001 -- an error ends only its own connection
            self._refused += 1
            # At the 1st, 2nd, 4th, 8th … time: strangers must not fill the log.
            if not self._closed and self._refused & (self._refused - 1) == 0:
                self._log(f"a connection was closed ({self._refused} so far): {type(error).__name__}: {error}")
        finally:
            self._connections.discard(connection)
            close_quietly(connection)

    def _serve_keeper(self, connection: socket.socket) -> None:
        self._strangers.add(connection)
        trust = partial(self._strangers.remove, connection)
        try:
            receive_copies(connection, self._secret, self._take_copy, self._summing, zlib.crc32, trust)
        finally:
            trust()

    def _serve_process(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            raise PermissionError(f"process {pid} of user {user} must not use the keeper of user {os.getuid()}")
        while (received := receive_message(connection)) is not None:
            verb = received[0].pop("verb", None)
            try:
                if verb not in self._verbs:
                    raise KeeperError(f"unknown verb {verb!r}; allowed: {', '.join(self._verbs)}")
                answer, descriptors = self._verbs[verb](**received[0])
            except KeeperError as error:
                answer, descriptors = {"error": str(error)}, ()
            except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
                answer, descriptors = {"error": f"{verb} failed: {type(error).__name__}: {error}"}, ()
            try:
                send_message(connection, answer, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _reserve(self, rank: int, bytes: int, generation: int) -> Answer:  # noqa: A002 -- the name in the manifest
        key = (True, rank, bytes)
        with self._lock:
            for slot in self._slots.get(key, []):
                slot.generation = generation  # from here on it is not freed
            missing = SLOTS_EACH - len(self._slots.get(key, []))
        created = self._make_slots(missing, rank, bytes)  # seconds for many gigabytes: not under the lock
        with self._lock:
            for slot in created:
                slot.generation = generation
                if len(self._slots.setdefault(key, [])) < SLOTS_EACH:
                    self._slots[key].append(slot)
                else:  # another process of this rank has created them meanwhile
                    slot.close()
            slots = list(self._slots[key])
            descriptors = tuple(os.dup(slot.descriptor) for slot in slots)
        token = secrets.token_hex(8)
        for slot in slots:
            with slot.lock:  # the commit of a dead rank completes first
                slot.token, slot.generation = token, generation
        messages = [
            {"slot": slot.number, "save": slot.save, "step": slot.manifest["step"] if slot.is_whole else -1}
            for slot in slots
        ]
        return {"token": token, "slots": messages}, descriptors

    def _make_slots(self, count: int, rank: int, num_bytes: int) -> list[Slot]:
        slots: list[Slot] = []
        try:
            while len(slots) < count:
                slots.append(Slot(next(self._numbers), rank, num_bytes, True, self.folder))
        except KeeperError:
            for slot in slots:  # a single slot is useless
                slot.close()
            raise
        return slots

    def _filled(self, slot: int, token: str, manifest: dict[str, Any], keep: str | None, buddy: str | None) -> Answer:
        began = time.monotonic()
        held = self._find(slot)
        _check_manifest(manifest, held.bytes)
        with held.lock:
            if held.token != token:
                raise KeeperError(f"slot {slot} now belongs to a later process of rank {held.rank}")
            manifest["sums"] = self._sums(held)
            held.commit(manifest)
            descriptor = self._duplicate(slot)  # it may be freed while it is sent
        self._counts["commits"] += 1
        self._counts["last_commit_seconds"] = time.monotonic() - began
        problem = None
        try:
            if buddy is not None:
                problem = self._push(buddy, descriptor, manifest, keep)
        finally:
            os.close(descriptor)
        replicated = buddy is not None and problem is None
        return {"replicated": replicated, "problem": problem, "seconds": time.monotonic() - began}, ()

    def _push(self, buddy: str, descriptor: int, manifest: dict[str, Any], keep: str | None) -> str | None:
        """Copy a slot to the buddy; return why there is no copy, None on success."""
        began = time.monotonic()
        try:
            self._buddies.push(buddy, descriptor, manifest, keep)
        except KeeperError as error:
            self._counts["push_failures"] += 1
            return str(error)
        self._counts["pushes"] += 1
        self._counts["last_push_seconds"] = time.monotonic() - began
        return None

    def _take_copy(self, manifest: dict[str, Any], keep: str | None) -> Slot:
        """Return a locked, invalid slot for a copy from another node: not the one that must be kept, and none for a
        push that a later generation of the rank has overtaken."""
        _check_manifest(manifest, manifest.get("bytes"))
        rank, size = manifest["rank"], manifest["bytes"]
        key = (False, rank, size)
        deadline = time.monotonic() + STALL_SECONDS
        while True:
            with self._lock:
                slots = self._slots.get(key, [])
                if any(slot.is_whole and slot.manifest["course"] > manifest["course"] for slot in slots):
                    raise KeeperError(f"a later save of rank {rank} is already here")
                free = [slot for slot in slots if slot.save is None or slot.save != keep]
                if not free and len(slots) == SLOTS_EACH:
                    raise KeeperError(f"both slots for rank {rank} hold {keep}, which must be kept")
                room = len(slots) < SLOTS_EACH and not any(slot.save is None for slot in free)
            if room:
                slot = Slot(next(self._numbers), rank, size, False, self.folder)
                slot.generation = manifest["generation"]
                with self._lock:
                    self._slots.setdefault(key, []).append(slot)
            else:
                slot = min(free, key=lambda item: item.age)
            if slot.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self._lock:
                    if slot in self._slots.get(key, []) and (slot.save is None or slot.save != keep):
                        slot.invalidate()
                        slot.generation = manifest["generation"]
                        self._counts["copies_received"] += 1
                        return slot
                slot.lock.release()  # it was freed, or now holds the save to keep
            elif time.monotonic() >= deadline:
                raise KeeperError(f"the slots for copies of rank {rank} are busy")

    def _sums(self, slot: Slot) -> list[int]:
        data = slot.data()
        blocks = (data[begin : begin + BLOCK_BYTES] for begin in range(0, data.nbytes, BLOCK_BYTES))
        return list(self._summing.map(zlib.crc32, blocks))

    def _holdings(self) -> Answer:
        with self._lock:
            whole = [slot for slot in self._all() if slot.is_whole]
        return {"holdings": [{"slot": s.number, "own": s.own, "manifest": s.manifest} for s in whole]}, ()

    def _open(self, slot: int) -> Answer:
        return {}, (self._duplicate(slot),)

    def _give_back(self, token: str) -> Answer:
        return self._remove(lambda slot: slot.own and slot.token == token and not slot.is_whole)

    def _free(self, generation: int) -> Answer:
        return self._remove(lambda slot: slot.generation < generation)

    def _remove(self, is_useless: Callable[[Slot], bool]) -> Answer:
        freed = 0
        with self._lock:
            for key, slots in list(self._slots.items()):
                for slot in [item for item in slots if is_useless(item)]:
                    slots.remove(slot)
                    slot.close()
                    freed += HEADER_BYTES + slot.bytes
                if not slots:
                    del self._slots[key]
        return {"bytes": freed}, ()

    def _forget(self, after: int, saves: list[str]) -> Answer:
        forgotten = []
        with self._lock:
            for slot in self._all():
                if slot.is_whole and (slot.manifest["step"] > after or slot.manifest["save"] in saves):
                    forgotten.append(slot.manifest["save"])
                    slot.invalidate()
        return {"forgotten": sorted(set(forgotten))}, ()

    def _corrupt(self, rank: int | None, whose: str) -> Answer:
        if whose not in ("own", "copies", "all"):
            raise KeeperError(f"whose is {whose!r}; allowed: own, copies, all")
        newest: dict[tuple[bool, int], Slot] = {}
        with self._lock:
            for slot in self._all():
                wanted = rank in (None, slot.rank) and whose in ("all", "own" if slot.own else "copies")
                key = (slot.own, slot.rank)
                if wanted and slot.is_whole and slot.bytes and (key not in newest or slot.age > newest[key].age):
                    newest[key] = slot
        done = []
        for slot in newest.values():
            place = HEADER_BYTES + slot.bytes // 2
            slot.memory[place] ^= 1
            kind = "the slot" if slot.own else "the copy"
            done.append(f"{self.node}: byte {place - HEADER_BYTES:,} of {kind} of rank {slot.rank}, save {slot.save}")
        return {"done": done}, ()

    def _status(self) -> Answer:
        with self._lock:
            slots = list(self._all())
        held = sum(HEADER_BYTES + slot.bytes for slot in slots)
        steps = [slot.manifest["step"] for slot in slots if slot.is_whole]
        status = {"node": self.node, "bytes": held, "slots": len(slots), "newest_step": max(steps, default=None)}
        status["sizes"] = sorted(slot.bytes for slot in slots)
        return {**status, **self._counts}, ()

    def _find(self, number: int) -> Slot:
        with self._lock:
            return self._look_up(number)

    def _duplicate(self, number: int) -> int:
        """Return a descriptor that stays valid when the slot is freed; the caller closes it."""
        with self._lock:
            return os.dup(self._look_up(number).descriptor)

    def _look_up(self, number: int) -> Slot:
        for slot in self._all():
            if slot.number == number:
                return slot
        raise KeeperError(f"there is no slot {number}; it was freed")

    def _all(self) -> itertools.chain[Slot]:
        return itertools.chain.from_iterable(self._slots.values())

    def _log(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"keeper {self.node}: {text}", file=sys.stderr, flush=True)


def _check_manifest(manifest: Mapping[str, Any], num_bytes: object) -> None:
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(manifest.get(name), kind)]
    if wrong or manifest["bytes"] != num_bytes:
        raise KeeperError(f"a manifest has no valid {', '.join(wrong) or 'bytes'}")
