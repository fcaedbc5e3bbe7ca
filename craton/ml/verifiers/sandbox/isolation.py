"""Which isolation this machine offers, found by trying: a program is confined and reports what it could reach."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from craton.ml.verifiers.errors import IsolationError
from craton.ml.verifiers.sandbox.confined import launch
from craton.ml.verifiers.sandbox.confinement import Confinement, Isolation
from craton.ml.verifiers.sandbox.landlock import landlock_version

TRIAL_SECONDS = 20.0
INSTALL_ISOLATION = (
    "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap), or allow user namespaces on this machine"
)
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
    "network": fails(lambda: socket.create_connection(("127.0.0.1", PORT), 1)),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]) < 9,
    "files": all(fails(lambda: open(path)) for path in ("/etc/passwd", "/etc/hostname", "/proc/1/environ")),
    "libraries": fails(lambda: open("/usr/lib/x", "w")),
    "folder": not fails(lambda: open("/sandbox/x", "w")),
    "user": os.geteuid() != 0,
    "environment": len(os.environ) < 16,
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
    return isolation_of(probe_isolation())


def isolation_of(report: IsolationReport) -> Isolation:
    """Return what a report found; IsolationError if it found nothing."""
    if report.isolation is None:
        raise IsolationError(
            f"this machine cannot confine code that a model wrote ({report.describe()}); {INSTALL_ISOLATION}, or set "
            "`verify: {sandbox: off}` to run it with all rights of this user"
        )
    return report.isolation


def probe_isolation() -> IsolationReport:
    """Call `find_isolation` in a process of its own, for it forks; safe in one with threads or torch."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import print_report; print_report()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        reason = (result.stderr.strip().splitlines() or ["the trial did not start"])[-1]
        return IsolationReport(None, dict.fromkeys(Isolation, reason), landlock_version())
    isolation = Isolation(found["isolation"]) if found["isolation"] else None
    return IsolationReport(
        isolation, {Isolation(name): text for name, text in found["reasons"].items()}, found["landlock"]
    )


def print_report() -> None:
    print(json.dumps(asdict(find_isolation())))


def try_isolation(isolation: Isolation) -> str:
    """Return why an isolation does not work here, empty where it does."""
    if sys.platform != "linux":
        return f"needs Linux, not {sys.platform}"
    if isolation is Isolation.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "not installed"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        source = f"PORT = {listener.getsockname()[1]}\n{TRIAL}"
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
