"""Cost of the sandbox, and how late hostile samples end: `python benchmarks/sandbox.py`.

Starts `python -c pass` directly and confined, in turn, so that other load slows both. Then verifies hostile programs
one at a time, and prints how long after the limit each verdict comes.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.verifiers import VerifierPool, VerifierSample
from craton.ml.verifiers.sandbox import Confinement, Isolation, launch, try_isolation

TIMES = 41
LIMIT_SECONDS = 1.0
MAX_MORE_SECONDS = 0.05  # of the bar: `python -c pass` in the sandbox
MAX_LATE_SECONDS = 0.5
PASS = [sys.executable, "-I", "-c", "pass"]
HOSTILE = {
    "sleeps": "import time; time.sleep(1000)",
    "spins": "while True: pass",
    "traps signals": (
        "import signal, time\n"
        "for s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, lambda *_: None)\nwhile True: time.sleep(1)"
    ),
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts daemons": (
        "import subprocess, sys, time\nfor _ in range(30):\n"
        "    subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)\ntime.sleep(1000)"
    ),
    "prints without end": "while True: print('x' * 100000)",
    "eats memory in children": (
        "import os, time\nfor _ in range(16):\n    if os.fork() == 0: break\nx = bytearray(60 << 20)\ntime.sleep(1000)"
    ),
    "fills its folder": (
        "while True:\n    try:\n        with open('x', 'wb') as f: f.write(bytes(1 << 24))\n    except OSError: pass"
    ),
}


def main() -> None:
    isolations = [isolation for isolation in Isolation if isolation is not Isolation.OFF]
    found = [isolation for isolation in isolations if not try_isolation(isolation)]
    for isolation in found:
        print_start_cost(isolation)
    print_lateness()


def print_start_cost(isolation: Isolation) -> None:
    direct, confined = [], []
    for _ in range(TIMES):
        direct.append(start_seconds(Isolation.OFF))
        confined.append(start_seconds(isolation))
    more = statistics.median(two - one for one, two in zip(direct, confined, strict=True))
    verdict = "ok" if more <= MAX_MORE_SECONDS else "MISSED"
    print(
        f"python -c pass: {1e3 * statistics.median(direct):.1f} ms, in {isolation} "
        f"{1e3 * statistics.median(confined):.1f} ms: {1e3 * more:.1f} ms longer "
        f"(bar {1e3 * MAX_MORE_SECONDS:.0f} ms: {verdict})"
    )


def start_seconds(isolation: Isolation) -> float:
    """Seconds from the start to the end of all processes; without isolation by a plain fork and exec."""
    begin = time.perf_counter()
    if isolation is Isolation.OFF:
        pid = os.posix_spawn(PASS[0], PASS, {})
        os.waitpid(pid, 0)
        return time.perf_counter() - begin
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = launch(PASS, Confinement(isolation), theirs.fileno(), 2)
        os.waitpid(process.pid, 0)
    return time.perf_counter() - begin


def print_lateness() -> None:
    terms = [RewardTerm.model_validate({"verifier": "code"})]
    verify = VerifySection.model_validate({"limit": LIMIT_SECONDS, "workers": 2, "memory": "512MiB"})
    late = {}
    with VerifierPool(terms, verify) as pool:
        for name, program in HOSTILE.items():
            begin = time.perf_counter()
            (decided,) = pool.verify([VerifierSample("", program, {"answer": "assert f() == 1"})])
            late[name] = time.perf_counter() - begin - LIMIT_SECONDS
            reason = decided.error.removeprefix("code: ") or f"reward {decided.reward:g}"
            print(f"{name}: verdict {1e3 * late[name]:+.0f} ms from the limit ({reason})")
    latest = max(late.values())
    verdict = "ok" if latest <= MAX_LATE_SECONDS else "MISSED"
    print(f"latest: {1e3 * latest:+.0f} ms (bar {1e3 * MAX_LATE_SECONDS:.0f} ms: {verdict})")


if __name__ == "__main__":
    main()
