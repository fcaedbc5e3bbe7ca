"""Processes that run with the rights of this user, and still end with everything that they started."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from craton.ml.verifiers.sandbox import kernel
from craton.ml.verifiers.sandbox.limits import set_limit
from craton.ml.verifiers.sandbox.namespaces import become_init
from craton.ml.verifiers.sandbox.processes import kill_descendants

ADOPTION_SECONDS = 5.0


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, instead of the machine's first process."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def follow_parent(parent: int) -> None:
    """Wait until a process has adopted this one, and die with it from then on."""
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != parent:  # until the process between has ended
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    kernel.die_with_parent(parent)


def run_in_own_processes(body: Callable[[], None]) -> None:
    """Run `body` in a pid namespace of its own where this machine has them, else below a guard; never returns.

    Killing the children of the calling process ends everything in both cases."""
    own = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | (0 if os.geteuid() == 0 else kernel.CLONE_NEWUSER)

    def dumpable_body() -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        body()

    try:
        become_init(own, _mount_processes, dumpable_body)
    except OSError:
        run_below_guard(body)


def run_below_guard(body: Callable[[], None]) -> None:
    """Run `body` in a child; adopt what it leaves behind and end it, then exit with the child's status."""
    adopt_orphans()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        kernel.die_with_parent(guard)
        body()
        os._exit(0)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            kill_descendants(guard)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def limit_further_memory(memory_bytes: int) -> None:
    """Limit this process to the memory that it has already and this much more."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            set_limit(resource.RLIMIT_DATA, int(line.split()[1]) * 1024 + memory_bytes)
    set_limit(resource.RLIMIT_CORE, 0)


def _mount_processes() -> None:
    """Show the processes of the namespace in /proc, which libraries read about themselves; some machines forbid it."""
    with contextlib.suppress(OSError):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
