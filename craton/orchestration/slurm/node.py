"""`python node.py RUN`: the first process on every node of an allocation, and the parent of the node's agent.

RUN/allocation.json, written by the batch program, gives this host's node name and address. A killed agent is restarted
here, because on a cluster no other agent can do it. Slurm's signals are forwarded to the agent, which ends its ranks.

This file imports nothing of Craton: it starts on all nodes at the same time, often from one file server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

MARKERS = ("STOP", "DONE", "FATAL")
MAX_STARTS, STARTS_SECONDS = 5, 60.0  # maximum number of agent starts within this time
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_WRONG = 2


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m craton.orchestration.slurm.node RUN", file=sys.stderr)
        return EXIT_WRONG
    run = Path(arguments[0])
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        allocation = json.loads((run / "allocation.json").read_text(encoding="utf-8"))
        number, node = next((number, node) for number, node in enumerate(allocation["nodes"]) if node["host"] == host)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        print(f"craton: {host} is not in {run / 'allocation.json'} ({error!r})", file=sys.stderr)
        return EXIT_WRONG
    address = own_address(node["address"], [item["address"] for item in allocation["nodes"]])
    return Agent(run, number, str(node["name"]), address).supervise()


class Agent:
    """The agent of this node, over all its restarts."""

    def __init__(self, run: Path, number: int, name: str, address: str) -> None:
        self._run, self._number, self._name, self._address = run, number, name, address
        self._process: subprocess.Popen[bytes] | None = None
        self._is_signalled = False
        self._starts: list[float] = []

    def supervise(self) -> int:
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        while True:
            code = self._run_once()
            if code >= 0 or self._is_signalled or any((self._run / marker).exists() for marker in MARKERS):
                return abs(code)
            now = time.monotonic()
            self._starts = [moment for moment in self._starts if now - moment < STARTS_SECONDS]
            if len(self._starts) >= MAX_STARTS:
                print(f"craton: the agent of {self._name} was killed {MAX_STARTS} times in a row", file=sys.stderr)
                return abs(code)
            print(f"craton: the agent of {self._name} was killed by signal {-code}; starting it again", file=sys.stderr)

    def _run_once(self) -> int:
        self._starts.append(time.monotonic())
        words = [sys.executable, "-m", "craton.agent", str(self._run), "--node", str(self._number)]
        environment = {**os.environ, "CRATON_ADDRESS": self._address}
        log = open_log(self._run / "logs" / f"agent-{self._name}.log")
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        finally:
            if log is not None:
                os.close(log)
        if self._is_signalled:  # during its start
            self._process.terminate()
        return self._process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def open_log(path: Path) -> int | None:
    """Open the agent's log for appending. None (Slurm's own log) if it is not a regular file of this folder or cannot
    be written: another user may have put a pipe there, which would block, or a link to a file of this user."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            log = os.open(path.name, flags, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        print(f"craton: {path} cannot be written ({error.strerror}): the agent logs here instead", file=sys.stderr)
        return None
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        print(f"craton: {path} is not a regular file: the agent logs here instead", file=sys.stderr)
        return None
    os.set_blocking(log, True)
    return log


def own_address(stated: str, all_addresses: list[Any]) -> str:
    """Return the address at which other nodes reach this one: Slurm's NodeAddr. If that is a loopback address here
    (Debian's hosts file maps the host name to 127.0.1.1), return the source address towards another node."""
    mine = resolved(stated)
    others = [resolved(str(all_address)) for all_address in all_addresses if all_address != stated]
    afar = [other for other in others if not other.startswith("127.")]
    if not mine.startswith("127.") or not afar:
        return mine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((afar[0], 9))  # sends nothing: only selects the route
        return str(probe.getsockname()[0])


def resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
