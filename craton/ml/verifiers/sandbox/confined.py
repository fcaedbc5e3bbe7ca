"""Start a confined process, and end it with everything that it started.

`launch` forks: call it from a small single-threaded process, not from one that has loaded torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.ml.verifiers.sandbox import kernel
from craton.ml.verifiers.sandbox.bubblewrap import bubblewrap_command
from craton.ml.verifiers.sandbox.confinement import ENVIRONMENT, FOLDER, Confinement, Isolation
from craton.ml.verifiers.sandbox.guard import run_below_guard
from craton.ml.verifiers.sandbox.limits import set_resource_limits
from craton.ml.verifiers.sandbox.namespaces import NOT_STARTED, confine
from craton.ml.verifiers.sandbox.processes import children, descendants, kill, kill_descendants, memory_bytes

END_SECONDS = 2.0
UNCONFINED_PREFIX = "craton-verify-"


@dataclass
class ConfinedProcess:
    """A running sandbox, seen from outside: `pid` is the process that waits for all of it."""

    pid: int
    isolation: Isolation
    folder: Path | None = None  # of this machine; only without isolation
    status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status once it ended: N, or -N after signal N."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self._ended(status)
        return self.status

    def kill(self) -> None:
        """Send SIGKILL to everything; `reap` or `poll` tell when all of it has ended."""
        if self.poll() is not None:
            return
        if self.isolation is Isolation.OFF:
            kill_descendants(self.pid)
            kill(self.pid)
            return
        # The init of the pid namespace, or what a guard waits for: the process that waits ends when all have ended.
        inits = children(self.pid)
        for init in inits:
            kill(init)
        if not inits:
            kill(self.pid)

    def reap(self) -> None:
        """Kill, and return once all processes have ended and the folder is removed."""
        deadline = time.monotonic() + END_SECONDS
        self.kill()
        while self.poll() is None:
            if time.monotonic() > deadline:
                kill_descendants(self.pid)
                kill(self.pid)
                with contextlib.suppress(ChildProcessError):
                    self._ended(os.waitpid(self.pid, 0)[1])
                return
            time.sleep(0.001)

    def usage(self) -> tuple[int, int]:
        """Return (memory in bytes, processes) of everything inside."""
        inside = descendants(self.pid)
        return sum(memory_bytes(pid) for pid in inside), len(inside)

    def _ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        # A wrapper exits with 128 + N after signal N; other numbers are what the program chose.
        self.status = 128 - code if code > 128 and code - 128 in signal.valid_signals() else code
        if self.folder is not None:
            _remove(self.folder)


def launch(command: Sequence[str], confinement: Confinement, channel: int, errors: int) -> ConfinedProcess:
    """Start a command whose standard input is `channel` (a socket, to be read and written) and whose standard error
    is `errors`; its standard output goes nowhere. Both descriptors stay open here."""
    folder = None
    if confinement.isolation is Isolation.OFF:
        folder = Path(tempfile.mkdtemp(prefix=UNCONFINED_PREFIX))
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return ConfinedProcess(pid, confinement.isolation, folder)
    try:
        _become(command, confinement, (channel, errors), parent, folder)
    except BaseException as error:  # noqa: BLE001 (a forked copy must never return into the caller's code)
        with contextlib.suppress(OSError):
            os.write(2, f"{error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _become(
    command: Sequence[str], confinement: Confinement, descriptors: tuple[int, int], parent: int, folder: Path | None
) -> None:
    os.setsid()
    kernel.die_with_parent(parent)
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((descriptors[0], 0), (nothing, 1), (descriptors[1], 2)):
        os.dup2(source, target)
    os.closerange(3, 1 << 20)
    set_resource_limits(confinement.limits)
    if confinement.isolation is Isolation.BUBBLEWRAP:
        wrapped = bubblewrap_command(command, confinement)
        os.execve(shutil.which(wrapped[0]) or wrapped[0], wrapped, ENVIRONMENT)
    elif confinement.isolation is Isolation.NAMESPACES:
        confine(command, confinement)
    else:
        assert folder is not None
        values = {name: str(folder) if value == FOLDER else value for name, value in ENVIRONMENT.items()}
        os.chdir(folder)
        run_below_guard(lambda: os.execve(command[0], list(command), values))


def _remove(folder: Path) -> None:
    """Remove a folder, also one whose permissions a program has changed."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
