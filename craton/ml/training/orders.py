"""Orders from the node's agent to a rank: the generations to enter, one after the other, and requests for a recording.

A thread waits for orders, because the rank itself may be blocked in a collective whose other side is dead. On gloo only
a closed connection ends such a wait. So when a generation breaks, the thread shuts down every TCP connection of this
process, and the wait ends at once on both sides; clients of other services reconnect by themselves. On NCCL it aborts
the communicators. A planned generation is only a request: the rank finishes its step first.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from craton.agent import Generation
from craton.agent.processes import DUMP, RECORD
from craton.ml.store import join_group
from craton.ml.training.flight_recorder import begin_recording, write_recording
from craton.telemetry.rank import dump_stacks

ABORT_SECONDS = 2.0  # for aborts of communicators; the agent ends a rank that does not leave after five
VARIABLE = "CRATON_ORDERS"  # environment variable: the file descriptor that orders come through


class RegroupError(Exception):
    """The generation of this rank is over."""


@dataclass(frozen=True)
class Order:
    """Enter this generation as this rank; or exit, if the generation has none on this node."""

    generation: Generation
    rank: int
    node: str
    keeper: str  # local address of the node's keeper; "": there is none
    broke_at: float = 0.0  # monotonic clock: when the previous generation stopped making progress; 0: it did not

    @property
    def is_last(self) -> bool:
        return not self.generation.ranks_of(self.node)

    @property
    def local_rank(self) -> int:
        return self.rank - self.generation.ranks_of(self.node).start


class Orders:
    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, True)
        self._stream = os.fdopen(descriptor, "rb")
        self._arrived = threading.Condition()
        self._newest: Order | None = None
        self._entered = -1
        self._planned: Callable[[Sequence[str]], None] | None = None
        self._broken: Callable[[], None] | None = None
        self._recording: threading.Thread | None = None
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Orders | None:
        """None: no agent gives orders here."""
        try:
            descriptor = int(os.environ.pop(VARIABLE))
            return cls(descriptor) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
        except (KeyError, ValueError, OSError):
            return None

    def next(self, seconds: float | None = None) -> Order | None:
        """Wait for a generation that was not entered yet, and enter the newest; None on timeout."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self.is_over, seconds):
                return None
            assert self._newest is not None
            self._entered = self._newest.generation.number
            self._planned = self._broken = None
            return self._newest

    @property
    def is_over(self) -> bool:
        """Whether there is a newer generation than the current one."""
        return self._newest is not None and self._newest.generation.number > self._entered

    @property
    def is_broken(self) -> bool:
        """Whether the generation is over and nothing in it can finish."""
        return self.is_over and self._newest is not None and not self._newest.generation.is_planned

    def check(self) -> None:
        """Raise RegroupError if nothing in the generation can finish."""
        if self.is_broken:
            assert self._newest is not None
            raise RegroupError(self._newest.generation.reason)

    @property
    def broke_at(self) -> float:
        """When the generation before the newest one stopped making progress (monotonic clock); 0: it did not."""
        return self._newest.broke_at if self._newest is not None else 0.0

    def is_broken_within(self, seconds: float) -> bool:
        """Wait for news that the generation is broken."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self.is_broken, seconds)

    def when_planned(self, leave: Callable[[Sequence[str]], None]) -> None:
        """Call `leave` with the nodes of a planned generation when it is ordered."""
        with self._arrived:
            self._planned = leave
            if self.is_over and self._newest is not None and self._newest.generation.is_planned:
                leave(self._newest.generation.nodes)

    def when_broken(self, seal: Callable[[], None]) -> None:
        """Call `seal` when the generation breaks, before connections are cut."""
        with self._arrived:
            self._broken = seal
            if self.is_broken:
                seal()

    def _listen(self) -> None:
        for line in self._stream:
            document: dict[str, Any] = json.loads(line)
            if DUMP in document:
                dump_stacks()
                continue
            if RECORD in document:
                self._record(Path(document[RECORD]))
                continue
            generation = Generation.from_message(document.pop("generation"))
            with self._arrived:
                is_first = self._newest is None
                self._newest = Order(generation, **document)
                if generation.is_planned and self._planned is not None:
                    self._planned(generation.nodes)
                elif not is_first and not generation.is_planned and generation.number > self._entered:
                    if self._broken is not None:
                        self._broken()
                    cut_connections()
                self._arrived.notify_all()

    def _record(self, path: Path) -> None:
        """Write the recording in a thread of its own: if torch blocks, this rank can still leave the generation."""
        if self._recording is None or not self._recording.is_alive():
            self._recording = threading.Thread(target=write_recording, args=(path,), daemon=True)
            self._recording.start()


def cut_connections() -> None:
    """End every wait for another rank, on both sides."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and dist.is_initialized():
        abort_groups()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def abort_groups() -> None:
    """Abort the communicators of all process groups at the same time: aborting one waits for the device, on which
    kernels of the others may wait for a rank that is gone."""
    module = dist.distributed_c10d
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in list(module._world.pg_names)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        return  # as in the creation of a communicator, which ends when its connections are closed
    # They are aborted already; this makes torch forget them, if the rank itself has not destroyed them meanwhile.
    with contextlib.suppress(Exception):
        module._abort_process_group()


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # whatever torch raises, the rank still needs its orders
        group.abort()


def connect(order: Order, backend: str, secret: bytes) -> None:
    """Create the process group of a generation through the keeper's store, under names of this generation."""
    generation = order.generation
    # torch names groups by a counter. If it was interrupted while it made a group, that group is still counted, and
    # ranks with different counts would wait for each other under different names.
    dist.distributed_c10d._world.group_count = 0
    prefix = f"generation/{generation.number}"
    begin_recording()
    join_group(backend, generation.store, secret, prefix, order.rank, generation.world)
