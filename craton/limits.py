"""Resource limits of this process: open files, memory, CPUs. Messages name the limit, its value and how to raise it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from craton.formatting import memory

if TYPE_CHECKING:
    import logging

WANTED_FILES = 65536
SHORT_SHARE = 0.95  # of the files that a process may open
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a huge number
MORE_FILES = (
    f"`ulimit -n {WANTED_FILES}` before the start raises the limit (also LimitNOFILE= in a systemd unit, nofile in "
    "/etc/security/limits.conf, --ulimit nofile= for Docker)"
)
MORE_MEMORY = (
    "raise the limit (--mem in Slurm, resources.limits.memory in Kubernetes, --memory in Docker), or use less memory: "
    "a smaller layout.micro_batch, more layout.recompute (activation checkpointing), more ranks"
)
_FILE_WORDS = ("Too many open files", "Errno 24")
_MEMORY_WORDS = ("Cannot allocate memory", "MemoryError", "bad_alloc", "not enough memory", "can't allocate memory")


def raise_file_limit(needed: int = 0) -> str:
    """Raise the soft limit of open files to the hard limit; a soft limit of 1024 only serves programs that use
    select(2). Return an error message if the process may still open fewer than `needed` files, else ""."""
    limits = _file_limits()
    if limits is None:
        return ""
    soft, hard = limits
    if soft < hard:
        import resource

        with contextlib.suppress(OSError, ValueError):  # macOS refuses "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = (_file_limits() or limits)[0]
    if soft >= needed:
        return ""
    return f"this process may open {soft} files (`ulimit -n`) and needs {needed}; {MORE_FILES}"


def file_shortage() -> str:
    """Return a warning when this process is close to its limit of open files, else "" (also where that is unknown).
    uvloop silently drops connections that it cannot accept."""
    limits = _file_limits()
    if limits is None or not Path("/proc/self/fd").is_dir():
        return ""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        return explain(error) if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{num_open} files are open: {_files_text()}" if num_open >= SHORT_SHARE * limits[0] else ""


def explain(error: BaseException) -> str:
    """Return the error message, with the resource limit behind it if there is one."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f"{error}: {_files_text()}"
    if number == errno.ENFILE:
        return f"{error}: this machine may open {_file_max()} files; `sysctl -w fs.file-max=NUMBER` raises the limit"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return f"{str(error) or 'out of memory'}: {memory_text()}; {MORE_MEMORY}"
    return str(error)


def limit_hint(printed: str) -> str:
    """Return the resource limit that a program ran into, judged by its output; "" if the output shows none."""
    if any(words in printed for words in _FILE_WORDS):
        return f"it ran out of open files: {_files_text()}"
    if any(words in printed for words in _MEMORY_WORDS):
        return f"it ran out of memory: {memory_text()}; {MORE_MEMORY}"
    return ""


def name_limit(record: logging.LogRecord) -> bool:
    """Log filter: add the limit and its remedy to errors that ran into one, such as asyncio's when it cannot accept a
    connection."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, OSError) and (text := explain(error)) != str(error):
        record.msg, record.args, record.exc_info = f"{record.getMessage().splitlines()[0]}: {text}", (), None
    return True


def memory_text(root: Path = Path("/")) -> str:
    """Return the tightest memory limit as text."""
    size, source = memory_limit(root)
    return f"{source} is {memory(size)}"


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Return (bytes, source of the limit): a cgroup, this process, or the machine."""
    bounds = [(_machine_bytes(root), "the memory of this machine")]
    own = _address_space()
    if own is not None:
        bounds.append((own, "the limit of this process (`ulimit -v`)"))
    for folder in cgroup_folders("memory", root=root):
        sizes = [number_in(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
        source = f"the memory limit of the cgroup {folder}"
        bounds += [(size, source) for size in sizes if size is not None and size < UNLIMITED_BYTES]
    return min(bounds)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the CPU quota of this process's cgroups, rounded up; None: no limit."""
    quotas = [cgroup_quota(folder) for folder in cgroup_folders("cpu", root=root)]
    return min((math.ceil(quota) for quota in quotas if quota is not None), default=None)


def cgroup_quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup, of either version; None: no limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max 100000" is no limit
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    quota_of_1, period_of_1 = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
    return quota_of_1 / period_of_1 if quota_of_1 is not None and period_of_1 and quota_of_1 > 0 else None


def _files_text() -> str:
    soft, hard = _file_limits() or (0, 0)
    return f"this process may open {soft} files (`ulimit -n`, hard limit {hard}); {MORE_FILES}"


def _file_limits() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _file_max() -> str:
    try:
        return Path("/proc/sys/fs/file-max").read_text(encoding="ascii").strip()
    except OSError:
        return "a limited number of"


def _machine_bytes(root: Path) -> int:
    kilobytes = number_after(root / "proc" / "meminfo", "MemTotal:") or 0
    return kilobytes * 1024 if kilobytes else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_folders(controller: str, pid: int | None = None, root: Path = Path("/")) -> list[Path]:
    """Return the cgroup folders that may limit a process (default: this one), the innermost first (cgroups(7))."""
    try:
        lines = (root / "proc" / str(pid or "self") / "cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    mount = root / "sys" / "fs" / "cgroup"
    paths: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        inside = top / path.strip("/")
        # A container may see its own cgroup as the root of the hierarchy, whatever its path is outside.
        paths += [folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents]
    return [folder for folder in dict.fromkeys(paths) if folder.is_dir()]


def number_in(path: Path) -> int | None:
    """Return the number that is all of a file's text; None if it is another text."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" is no limit
        return None


def numbers_in(path: Path) -> dict[str, int]:
    """Return the numbers of a file of name-number lines."""
    with contextlib.suppress(OSError, ValueError):
        words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
    return {}


def number_after(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of name-number lines; None if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[0] == name:
                return int(words[1])
    return None
