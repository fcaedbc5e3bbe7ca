"""Which isolation this machine offers, found by trying: a program is confined and reports what it could reach."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import time
from dataclasses import dataclass

from craton.ml.verifiers.errors import IsolationError
from craton.ml.verifiers.sandbox.confinement import Confinement, Isolation
from craton.ml.verifiers.sandbox.landlock import landlock_version
from craton.ml.verifiers.sandbox.launch import launch

TRIAL_SECONDS = 20.0
INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap), or allow user namespaces on this machine"
# Runs confined: reports whether the network, other processes and other files are out of reach.
TRIAL = """
import json, os, socket
def fails(action):
    try:
        action()
    except OSError:
        return True
    return False
s = socket.socket(fileno=0)
report = {
    "network": fails(lambda: socket.create_connection(("127.0.0.1", int(PORT)), 1)),
    "processes": not os.path.exists("/proc/" + str(PID) + "/status") or len([p for p in os.listdir("/proc") if p.isdigit()]) < 9,
    "files": fails(lambda: os.listdir("/home")) and fails(lambda: open("/etc/passwd")) and fails(lambda: open("/usr/lib/x", "w")),
    "folder": not fails(lambda: open("/sandbox/x", "w")),
    "user": os.geteuid() != 0,
    "environment": "PROBED_SECRET" not in os.environ,
}
s.sendall(json.dumps(report).encode())
"""


@dataclass(frozen=True)
class IsolationReport:
    """The isolation that works here, and for each that does not the reason."""

    isolation: Isolation | None
    reasons: dict[Isolation, str]
    landlock: int

    def describe(self) -> str:
        """Return one line for people."""
        lock = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        if self.isolation is Isolation.BUBBLEWRAP:
            return "code of models runs in bubblewrap"
        if self.isolation is Isolation.NAMESPACES:
            return f"code of models runs in namespaces of its own ({lock}); bubblewrap: {self._reason('bubblewrap')}"
        return f"no isolation: bubblewrap: {self._reason('bubblewrap')}; namespaces: {self._reason('namespaces')}"

    def _reason(self, name: str) -> str:
        return self.reasons.get(Isolation(name), "not tried")


def find_isolation() -> IsolationReport:
    """Try bubblewrap, then namespaces of our own, and return the first that holds."""
    reasons: dict[Isolation, str] = {}
    for isolation in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        reason = try_isolation(isolation)
        if not reason:
            return IsolationReport(isolation, reasons, landlock_version())
        reasons[isolation] = reason
    return IsolationReport(None, reasons, landlock_version())


def require_isolation() -> Isolation:
    """Return the isolation of this machine; IsolationError says what is missing and how to get it."""
    report = find_isolation()
    if report.isolation is None:
        raise IsolationError(
            f"this machine cannot confine code that a model wrote ({report.describe()}); {INSTALL}, or set "
            "`verify: {sandbox: off}` to run it with all rights of this user"
        )
    return report.isolation


def try_isolation(isolation: Isolation) -> str:
    """Return why an isolation does not work here, empty where it does."""
    if sys.platform != "linux":
        return f"needs Linux, not {sys.platform}"
    if isolation is Isolation.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "not installed"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        source = f"PORT, PID = {listener.getsockname()[1]}, {os.getpid()}\n{TRIAL}"
        process = launch([sys.executable, "-I", "-S", "-c", source], Confinement(isolation), theirs.fileno(), writing)
        theirs.close()
        os.close(writing)
        try:
            answer = _read(ours.fileno(), time.monotonic() + TRIAL_SECONDS)
            process.reap()
            message = "" if answer else _read(reading, time.monotonic() + 1).decode(errors="replace").strip()
        finally:
            process.reap()
            ours.close()
            os.close(reading)
    return _judge(answer, message)


def _judge(answer: bytes, message: str) -> str:
    try:
        report = json.loads(answer)
    except ValueError:
        return message.splitlines()[-1][:200] if message else "the trial program did not start"
    reached = [name for name, is_out_of_reach in report.items() if not is_out_of_reach]
    return f"a confined program reached: {', '.join(reached)}" if reached else ""


def _read(descriptor: int, deadline: float) -> bytes:
    found = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([descriptor], [], [], left)[0]:
        try:
            data = os.read(descriptor, 65536)
        except OSError:
            break
        if not data:
            break
        found += data
    return found
