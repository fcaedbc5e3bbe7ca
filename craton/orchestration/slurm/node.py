"""The first process on every node of an allocation: `python node.py RUN`. It becomes the parent of the node's agent.

Which node of the run this host is, and at which address the others reach it, stands in RUN/allocation.json, which the
batch script wrote. An agent that is killed is started again, for on a cluster no other agent can. Signals of Slurm go
on to the agent, which ends its ranks.

Imports nothing of Craton: it is started once on every node at the same time, often from one file server.
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
MAX_STARTS, STARTS_SECONDS = 5, 60.0  # so many agents in so short a time, and no more
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
    """The agent of this node, through all processes that are it one after the other."""

    def __init__(self, run: Path, number: int, name: str, address: str) -> None:
        self._run, self._number, self._name, self._address = run, number, name, address
        self._process: subprocess.Popen[bytes] | None = None
        self._is_told = False
        self._starts: list[float] = []

    def supervise(self) -> int:
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        while True:
            code = self._run_once()
            if code >= 0 or self._is_told or any((self._run / marker).exists() for marker in MARKERS):
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
        if self._is_told:  # while it was being started
            self._process.terminate()
        return self._process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def open_log(path: Path) -> int | None:
    """To append to. None, which is Slurm's own log: it is not a regular file of this folder, or cannot be written.
    Another user may have put a pipe there, which would be waited for, or a link to a file of this user."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            log = os.open(path.name, flags, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        print(f"craton: {path} cannot be written ({error.strerror}): the agent's log is here", file=sys.stderr)
        return None
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        print(f"craton: {path} is not a regular file: the agent's log is here", file=sys.stderr)
        return None
    os.set_blocking(log, True)
    return log


def own_address(stated: str, all_addresses: list[Any]) -> str:
    """The address at which the others reach this node: the one that Slurm has for it. Where that is a loopback address
    here only (Debian's hosts file has the machine's own name at 127.0.1.1), the one it sends from to another node."""
    mine = resolved(stated)
    others = [resolved(str(all_address)) for all_address in all_addresses if all_address != stated]
    afar = [other for other in others if not other.startswith("127.")]
    if not mine.startswith("127.") or not afar:
        return mine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((afar[0], 9))  # sends nothing: asks which way it would go
        return str(probe.getsockname()[0])


def resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
