"""A rank of the live scenarios: real processes in lock-step over real sockets, one of them with a fault.

`python -m craton.bench.why.live_rank FOLDER`, started by an agent. In every step a rank reads its batch from a pipe,
which its loader fills (by itself, or from FILE_SERVER), works, and joins a sum over all ranks at rank 0; it records
times by its own clock. VICTIM is the faulty rank and FAULT its fault after HEALTHY_STEPS; FOLDER/onset is created right
before.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from craton.telemetry.rank import LedgerClock, Recorder

WORK_SECONDS, OPTIMIZER_SECONDS = 0.06, 0.004
HEALTHY_STEPS = 45
BATCH_BYTES = 4096
SLOW_TIMES = 3.0
MEMORY_ROOM_BYTES = 1 << 28
JOIN_SECONDS = 60.0
ONSET_FILE = "onset"


class Batches:
    """A pipe that a loader thread fills: at once, as fast as a file server allows, or never again."""

    def __init__(self, file_server: str = "") -> None:
        self._read, self._write = os.pipe()
        self._wanted = threading.Semaphore(2)
        host, _, port = file_server.rpartition(":")
        self._server = socket.create_connection((host, int(port))) if file_server else None
        self.is_stuck = False
        threading.Thread(target=self._fill, daemon=True).start()

    def next(self) -> int:
        count = 0
        while count < BATCH_BYTES:
            count += len(os.read(self._read, BATCH_BYTES - count))
        self._wanted.release()
        return count

    def _fill(self) -> None:
        while True:
            self._wanted.acquire()
            while self.is_stuck:
                time.sleep(1.0)
            if self._server is not None:
                self._server.sendall(b"?")
                self._server.recv(BATCH_BYTES, socket.MSG_WAITALL)
            os.write(self._write, bytes(BATCH_BYTES))


class Meeting:
    """A sum over all ranks: all ranks send to rank 0 and wait for its response."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank = rank
        place = folder / "meeting"
        deadline = time.monotonic() + JOIN_SECONDS
        if rank == 0:
            server = socket.create_server(("127.0.0.1", 0))
            fresh = place.with_suffix(".fresh")
            fresh.write_text(str(server.getsockname()[1]), encoding="utf-8")
            fresh.replace(place)
            self.peers = [server.accept()[0] for _ in range(world - 1)]
            return
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.peers = [socket.create_connection(("127.0.0.1", int(place.read_text(encoding="utf-8"))))]

    def sum(self) -> None:
        for peer in self.peers if self.rank == 0 else ():
            self._receive(peer)
        for peer in self.peers:
            peer.sendall(b"sum     ")
        for peer in self.peers if self.rank else ():
            self._receive(peer)

    def _receive(self, peer: socket.socket) -> None:
        count = 0
        while count < 8:
            num_bytes = len(peer.recv(8 - count))
            if not num_bytes:
                raise ConnectionError("Connection closed by peer")
            count += num_bytes

    def leave(self) -> None:
        for peer in self.peers:
            peer.shutdown(socket.SHUT_RDWR)


def main() -> None:
    faulthandler.enable()
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault, is_victim = os.environ.get("FAULT", ""), rank == int(os.environ.get("VICTIM", "-1"))
    steps = int(os.environ.get("STEPS", "100000"))
    recorder, clock = Recorder.from_environment(), LedgerClock()
    if fault in ("import", "mismatch"):
        (folder / ONSET_FILE).touch()
    if fault == "import" and is_victim:
        __import__("a_package_that_nobody_installed")
    if fault == "mismatch":
        call_collectives(rank, is_victim)
    batches, meeting = Batches(os.environ.get("FILE_SERVER", "")), Meeting(folder, rank, world)
    for step in range(1, steps + 1):
        is_sick = bool(fault) and step > HEALTHY_STEPS
        if is_sick and step == HEALTHY_STEPS + 1:
            (folder / ONSET_FILE).touch()
        clock.switch("data")
        clock.begin_step(step)
        moments = [time.monotonic()]
        batches.is_stuck = is_sick and is_victim and fault == "data"
        batches.next()
        moments.append(time.monotonic())
        clock.switch("productive")
        if is_sick and is_victim and fault in ACTS:
            ACTS[fault](meeting)
        time.sleep(WORK_SECONDS * (SLOW_TIMES if is_sick and is_victim and fault == "slow" else 1.0))
        moments.append(time.monotonic())
        meeting.sum()
        moments.append(time.monotonic())
        time.sleep(OPTIMIZER_SECONDS)
        moments.append(time.monotonic())
        data, compute, communication, optimizer = (after - before for before, after in pairwise(moments))
        recorder.metrics(
            step,
            run_step_seconds=moments[-1] - moments[0],
            run_data_seconds=data,
            run_compute_seconds=compute,
            run_communication_seconds=communication,
            run_optimizer_seconds=optimizer,
            run_checkpoint_seconds=0.0,
            run_loss=float("nan") if is_sick and fault == "nan" else 3.0 - 0.0001 * step,
        )


def _raise(_: Meeting) -> None:
    raise ValueError("the length of this sample is -1")


def _fill_disk(_: Meeting) -> None:
    with open("/dev/full", "wb") as file:
        file.write(b"x" * BATCH_BYTES)


def _use_memory(_: Meeting) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_ROOM_BYTES, size + MEMORY_ROOM_BYTES))
    held = []
    while True:
        held.append(bytearray(MEMORY_ROOM_BYTES // 8))


def _crash(_: Meeting) -> None:
    ctypes.string_at(0)


def _spin(_: Meeting) -> None:
    os.nice(19)  # leave the CPU to other processes
    while True:
        pass


def _vanish(meeting: Meeting) -> None:
    """Simulate a lost network: the rank is alive but unreachable."""
    meeting.leave()
    while True:
        time.sleep(1.0)


ACTS: dict[str, Callable[[Meeting], None]] = {
    "raise": _raise,
    "disk": _fill_disk,
    "memory": _use_memory,
    "crash": _crash,
    "spin": _spin,
    "vanish": _vanish,
}


def call_collectives(rank: int, is_victim: bool) -> None:
    """Call real PyTorch collectives; the victim calls another one than the other ranks."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch = import_module("torch")  # only this fault needs it
    import_module("torch.distributed")
    torch.distributed.init_process_group("gloo")
    for _ in range(3):
        torch.distributed.all_reduce(torch.ones(8))
    if is_victim:
        torch.distributed.all_gather([torch.ones(8) for _ in range(torch.distributed.get_world_size())], torch.ones(8))
    else:
        torch.distributed.all_reduce(torch.ones(8))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
