"""What a confined process sees, and the ways in which a machine can confine one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from craton.ml.verifiers.sandbox.limits import SandboxLimits
from craton.ml.verifiers.sandbox.readable import readable_paths

FOLDER = "/sandbox"  # the process's own folder: in memory, writable, gone with the process
SHARED_MEMORY_BYTES = 16 << 20
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "LANG": "C.UTF-8",
    # Libraries that start a thread for each core would use up the limit of processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# As root, each confined process runs as a user of its own: the kernel counts processes by user, and root's not at all.
# The numbers lie below 65536, for containers often have no others.
FIRST_USER, NUM_USERS = 50_000, 10_000


def sandbox_user(number: int) -> int:
    """Return the user of the N-th confined process; only root can change to it."""
    return FIRST_USER + number % NUM_USERS


class Isolation(StrEnum):
    """How code that a model wrote is kept away from the machine."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    OFF = "off"


@dataclass(frozen=True)
class Confinement:
    """One confined process: how, with which limits, and which folders it sees under which other name."""

    isolation: Isolation
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    also_readable: Mapping[str, str] = field(default_factory=dict)  # path inside → path of this machine
    user: int = FIRST_USER  # as root only

    @property
    def is_root(self) -> bool:
        return os.geteuid() == 0

    @property
    def links_tmp(self) -> bool:
        """Whether /tmp is the process's own folder. It is not where the interpreter or libraries lie below it."""
        return not any(path.startswith("/tmp/") for path in self.mounts())

    def mounts(self) -> dict[str, str]:
        """Path inside → path of this machine, read-only."""
        return {**{path: path for path in readable_paths()}, **self.also_readable}
