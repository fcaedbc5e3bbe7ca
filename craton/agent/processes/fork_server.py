"""The fork server, seen from the agent: a process that has imported what ranks need and forks one on request.

A fork takes milliseconds where an import takes seconds, so a dead rank is back at once. A forked process (rank or
keeper) becomes the agent's own child (see `adopt_orphans`) and outlives the fork server. Files, events and the
environment variable are called `nursery`, its name in earlier versions.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from craton.agent.generation import Generation
from craton.agent.launch import Launch
from craton.agent.processes.bytecode import bytecode_environment
from craton.agent.processes.process import (
    ChildProcess,
    RankProcess,
    command_environment,
    common_environment,
    pipe,
    start,
)
from craton.formatting import setting
from craton.telemetry import RunDirectory
from craton.telemetry.rank import STEADY

FORK_SECONDS = 4.0  # below the limit after which the agent itself looks dead
MESSAGE_BYTES = 1 << 20
FORK_SERVER_VARIABLE = "CRATON_NURSERY"  # environment of the fork server: descriptor of its socket
KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class ForkServerError(OSError):
    """The fork server is gone, or did not fork."""


class ForkServer:
    """One fork server process; `child` must be reaped like any other."""

    def __init__(
        self, run: RunDirectory, launch: Launch, node: str, when_ready: Callable[[int], None] = lambda pid: None
    ) -> None:
        """`when_ready` is called with its PID."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, KIND)
        log_path = run.path / "logs" / f"nursery-{node}.log"
        environment = {
            **({} if "PYTHONDONTWRITEBYTECODE" in launch.env else bytecode_environment({**os.environ, **launch.env})),
            **common_environment(run, launch, node),
            FORK_SERVER_VARIABLE: str(theirs.fileno()),
        }
        try:
            process, offset = start(launch.nursery or launch.standby, environment, log_path, (theirs.fileno(),))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection = ours
        self.child = ChildProcess(f"fork server of {node}", process.pid, log_path, offset, STEADY.now())
        self.is_ready = False
        self._when_ready = when_ready

    def hear(self) -> None:
        """Read its ready message, and tell that it is ready."""
        try:
            message = self.connection.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message == b"ready":
            self.is_ready = True
            self._when_ready(self.child.pid)

    def fork(self, kind: str, environment: Mapping[str, str], log_path: Path, descriptors: Mapping[str, int]) -> int:
        """Fork a rank or keeper whose environment names these descriptors, and return its PID."""
        request = {"what": kind, "environment": dict(environment), "log": str(log_path), "agent": os.getpid()}
        request["descriptors"] = list(descriptors)
        try:
            socket.send_fds(self.connection, [json.dumps(request).encode()], list(descriptors.values()))
            if not select.select([self.connection], [], [], FORK_SECONDS)[0]:
                raise ForkServerError(f"{self.child.name} did not answer within {setting(FORK_SECONDS)}")
            answer = self.connection.recv(MESSAGE_BYTES)
        except ForkServerError:
            self.child.send(signal.SIGKILL)
            raise
        except OSError as error:
            raise ForkServerError(f"{self.child.name} is gone ({error.strerror})") from error
        if not answer.isdigit():
            self.child.send(signal.SIGKILL)
            raise ForkServerError(f"{self.child.name} is gone or cannot fork")
        return int(answer)

    def fork_command(
        self, run: RunDirectory, launch: Launch, generation: Generation, node: str, rank: int, page: int
    ) -> RankProcess | None:
        """Fork a rank of a command, as `start_rank` starts it; None if it must be started: there is no fork server that
        is ready."""
        if not self.is_ready:
            return None
        reading, writing = pipe()
        started, log_path = STEADY.now(), run.log_path(rank)
        log_offset = log_path.stat().st_size if log_path.exists() else 0
        environment = command_environment(run, launch, generation, node, rank)
        try:
            pid = self.fork("rank", environment, log_path, {"CRATON_RECORDS": writing, "CRATON_PAGE": page})
        except ForkServerError as error:
            print(f"craton agent: {error}; starting {node}'s rank {rank} without it", file=sys.stderr, flush=True)
            os.close(reading)
            return None
        finally:
            os.close(writing)
        return RankProcess(f"rank {rank}", pid, log_path, log_offset, started, rank=rank, records=reading)

    def close(self) -> None:
        self.connection.close()


def answer_requests(connection: socket.socket, become: Sequence[str]) -> tuple[str, dict[str, str], str, int]:
    """Run the fork server: fork on every request, and return in the new process with (its kind, its environment, its
    log, the agent's PID). Exit when the agent is gone."""
    connection.sendall(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 16)
        if not data:
            os._exit(0)
        request = json.loads(data)
        assert request["what"] in become, request["what"]
        reading, writing = os.pipe()
        first = os.fork()
        if first == 0:
            second = os.fork()
            if second:
                os.write(writing, str(second).encode())
                os._exit(0)
            for descriptor in (reading, writing):
                os.close(descriptor)
            connection.close()
            named = {name: str(item) for name, item in zip(request["descriptors"], descriptors, strict=True)}
            return request["what"], {**request["environment"], **named}, request["log"], int(request["agent"])
        os.close(writing)
        pid = os.read(reading, 32)
        os.close(reading)
        os.waitpid(first, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(pid)
