"""How much a confined process may use, and the kernel's limits that enforce it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

OUTPUT_BYTES = 1 << 20  # what a sample may print or return before it is ended


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one confined process and of everything that it starts."""

    memory_bytes: int = 1 << 30
    processes: int = 64
    folder_bytes: int = 64 << 20  # of its own folder, which is in memory
    open_files: int = 256


def set_resource_limits(limits: SandboxLimits) -> None:
    """Limit this process and its descendants. The number of processes is not limited here: the kernel counts all
    processes of the user, so that limit is set after the user has changed."""
    set_limit(resource.RLIMIT_AS, limits.memory_bytes)
    set_limit(resource.RLIMIT_FSIZE, limits.folder_bytes)
    set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_MEMLOCK, 0)


def set_limit(kind: int, value: int) -> None:
    """Lower both the soft and the hard limit; a limit that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, allowed))
