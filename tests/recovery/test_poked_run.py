"""Strangers on the same machine, while a run trains and recovers: what listens, and what they can do to it."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from listeners import LOOPBACK, listeners_of
from rehearsed import check_ledger, events, finish, losses, processes_of, running, wait_until

from craton.agent import newest_generation
from craton.bench.recovery.rehearsal import Rehearsal
from craton.telemetry import RunDirectory

STEPS = 16
IDLE = 300  # connections that a stranger holds open at the store
TCPSTORE_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)  # VALIDATE and torch's magic number
WORDS = (
    b"",
    b"GET / HTTP/1.1\r\n",  # half a request
    b"\xff" * 512,
    b"craton1 " + bytes(16),  # an agent's greeting without a proof
    b"craton-store-1\n" + bytes(16 + 32),  # the store's, with a wrong proof
    TCPSTORE_HELLO,
)
# Another user where root can become one. Every port that it reads from its standard input is dialed once with each of
# the words; the last connections stay open, and so do `IDLE` ones to the first port, which is the store's.
STRANGER = f"""
import os, socket, sys
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
def dial(port, words):
    connection = socket.socket()
    connection.settimeout(2.0)
    try:
        connection.connect(("127.0.0.1", port))
        connection.sendall(words)
    except OSError:
        connection.close()
    return connection
held, idle, count = [], [], 0
for line in sys.stdin:
    port = int(line)
    idle = idle or [dial(port, b"") for _ in range({IDLE})]
    held += [dial(port, words) for words in {WORDS!r}]
    for connection in held[:-100]:
        connection.close()
    del held[:-100]
    count += 1
print(count)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not tell what listens")


class Stranger:
    """Dials every listener of a run, again and again; `seen` is where they were."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._over = run, threading.Event()
        self.seen: set[tuple[str, int]] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._point, daemon=True)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()

    def finish(self) -> int:
        """How many ports it has dialed."""
        self._over.set()
        self._thread.join()
        return int(self._process.communicate()[0])

    def _point(self) -> None:
        assert self._process.stdin is not None
        while not self._over.is_set():
            generation = newest_generation(self._run)
            if generation is not None:
                found = listeners_of(processes_of(self._run))
                self.seen |= found
                store = int(generation.store.rpartition(":")[2])
                for port in [store, *(port for _, port in found)]:
                    self._process.stdin.write(f"{port}\n")
                self._process.stdin.flush()
            self._over.wait(0.1)


@pytest.mark.slow
def test_a_local_run_listens_on_the_loopback_only_and_strangers_do_not_disturb_it(runs: Path) -> None:
    with running(runs, Rehearsal("unseen", ranks_per_node=1, steps=STEPS)) as run:
        finish(run)
        expected = losses(run)
    with running(runs, Rehearsal("poked", ranks_per_node=1, steps=STEPS)) as run, Stranger(run) as stranger:
        wait_until(lambda: max(losses(run), default=0) >= 4, "4 steps", run)
        killed = next(event for event in events(run, "rank_started") if event["rank"] == 1)
        os.kill(killed["pid"], signal.SIGKILL)
        finish(run)
        assert stranger.finish() > len(stranger.seen)
        assert len(stranger.seen) >= 10, "2 agents, metrics, stores, keepers, and gloo of 2 ranks"
        assert {address for address, _ in stranger.seen} <= LOOPBACK, stranger.seen
        assert losses(run) == expected
        assert [event["restored_from"] for event in events(run, "recovered")] == ["peer"]
        assert "SIGKILL" in events(run, "generation_started")[-1]["reason"]
        check_ledger(run)
