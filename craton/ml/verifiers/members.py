"""The processes of a pool, as its supervisor starts and sees them: sealed and open workers, and programs.

sealed: verify answers, one after the other, in a sandbox. program: one sample's code in a sandbox of its own.
open: users' functions, environments and the judge, forked from the template.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.ml.verifiers.sandbox import (
    NUM_USERS,
    OUTPUT_BYTES,
    ConfinedProcess,
    Confinement,
    Isolation,
    SandboxLimits,
    launch,
    own_package,
    package_folders,
    sandbox_user,
)
from craton.ml.verifiers.wire import Channel

PACKAGE_INSIDE = "/packages"
HARNESS = str(Path(__file__).with_name("harness.py"))
HARNESS_INSIDE = f"{PACKAGE_INSIDE}/harness.py"
SEALED_PROCESSES = 8
TAIL_BYTES = 2000
TEMPLATE_SECONDS = 300.0  # users' modules may import a whole framework


@dataclass
class VerifierTask:
    """One verification: a message for a worker of a group, and how often it was tried."""

    number: int
    group: str
    message: bytes
    follow_up: bytes = b""  # sent when the process asks for it
    attempts: int = 0
    not_before: float = 0.0  # monotonic: when it may be tried again
    seconds: float = 0.0


@dataclass(eq=False)
class PoolWorker:
    """A process with its connection and its standard error."""

    group: str
    process: ConfinedProcess
    channel: Channel
    output: int
    task: VerifierTask | None = None
    episode: int | None = None
    is_ready: bool = False
    deadline: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    reason: str = ""  # why it was killed
    reply: dict[str, Any] | None = None  # its last one
    is_killed: bool = False
    has_follow_up: bool = False
    base_bytes: int = 0
    printed_bytes: int = 0
    tail: bytes = b""

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    def read_output(self) -> bytes | None:
        """Return what it printed, None at the end."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError:
            return None
        self.printed_bytes += len(data)
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return data or None

    def last_line(self) -> str:
        lines = self.tail.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def close(self) -> None:
        self.channel.close()
        with contextlib.suppress(OSError):
            os.close(self.output)


class Starter:
    """Starts processes of each group with the settings of the pool."""

    def __init__(self, settings: Mapping[str, Any], isolation: Isolation) -> None:
        self._settings = settings
        self._isolation = isolation
        self._num_started = secrets.randbelow(NUM_USERS)  # so that pools of one machine share no users
        self._template: socket.socket | None = None
        self._template_process: subprocess.Popen[bytes] | None = None

    def start(self, group: str) -> PoolWorker:
        if group == "open":
            return self._fork_open()
        is_program = group == "program"
        off = self._isolation is Isolation.OFF
        package = own_package()
        readable = {HARNESS_INSIDE: HARNESS} if is_program else {f"{PACKAGE_INSIDE}/craton": package}
        if is_program:
            command = [sys.executable, "-I", HARNESS if off else HARNESS_INSIDE]
        else:
            path = str(Path(package).parent) if off else PACKAGE_INSIDE
            call = f"from craton.ml.verifiers.worker import main; main({self._settings['verifiers']!r})"
            # Without the environment the interpreter does not search folders that PYTHONPATH names.
            search = f"import sys; sys.path[:0] = [{path!r}]; sys.path += {package_folders()!r}"
            command = [sys.executable, "-I", "-c", f"{search}; {call}"]
        limits = SandboxLimits(self._settings["memory_bytes"])
        if not is_program:
            limits = SandboxLimits(self._settings["memory_bytes"], processes=SEALED_PROCESSES)
        self._num_started += 1
        confinement = Confinement(self._isolation, limits, readable, sandbox_user(self._num_started))
        ours, theirs, reading, writing = _connections()
        try:
            process = launch(command, confinement, theirs.fileno(), writing)
        finally:
            theirs.close()
            os.close(writing)
        return PoolWorker(group, process, Channel(ours, OUTPUT_BYTES * 2), reading)

    def load_template(self) -> None:
        """Start the template of open workers; RuntimeError with its message if the user's code cannot be loaded."""
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = python_command("craton.ml.verifiers.template", "start", theirs.fileno(), os.getpid())
        self._template_process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        theirs.close()
        ours.settimeout(TEMPLATE_SECONDS)
        try:
            ours.sendall(json.dumps(self._settings).encode())
            answer = json.loads(ours.recv(1 << 16) or b"{}")
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        if "ready" not in answer:
            ours.close()
            status = self._template_process.wait()
            raise RuntimeError(answer.get("error", f"the process that loads rewards ended with status {status}"))
        self._template = ours

    @property
    def template_pid(self) -> int:
        return self._template_process.pid if self._template_process is not None else -1

    def close(self) -> None:
        """End the template; workers that it has forked live on."""
        if self._template is not None:
            self._template.close()
            self._template = None
        if self._template_process is not None:
            self._template_process.kill()
            self._template_process.wait()
            self._template_process = None

    def _fork_open(self) -> PoolWorker:
        for attempt in range(2):
            if self._template is None:
                self.load_template()
            assert self._template is not None
            ours, theirs, reading, writing = _connections()
            try:
                socket.send_fds(self._template, [b"fork"], [theirs.fileno(), writing])
                pid = int(self._template.recv(64))
                process = ConfinedProcess(pid, Isolation.NAMESPACES)
                return PoolWorker("open", process, Channel(ours, OUTPUT_BYTES * 2), reading)
            except (OSError, ValueError):
                ours.close()
                os.close(reading)
                self.close()
                if attempt:
                    raise
            finally:
                theirs.close()
                os.close(writing)
        raise AssertionError("unreachable")


def python_command(module: str, function: str, *arguments: object) -> list[str]:
    """Return a command that calls a function in a new interpreter, which finds the same modules as this one."""
    listed = ", ".join(map(repr, arguments))
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}({listed})"
    return [sys.executable, "-c", code]


def _connections() -> tuple[socket.socket, socket.socket, int, int]:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return ours, theirs, reading, writing
