"""Linux calls that Python's standard library lacks: namespaces, mounts, Landlock, process attributes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT_CLEAR_ALL = 36, 4
LAST_CAPABILITY = 63  # the kernel answers EINVAL after its own last one
CAPABILITY_VERSION = 0x20080522

# The same numbers on every architecture: they were added after the tables were unified.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def check(result: int, what: str) -> int:
    """Return the result of a call, or raise OSError with what was tried."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel directly; negative with errno set where it fails."""
    if _library is None:
        raise OSError(f"namespaces exist on Linux only, not on {sys.platform}")
    return int(_library.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    if _library is None:
        raise OSError(f"prctl exists on Linux only, not on {sys.platform}")
    return int(_library.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0))


def unshare(flags: int) -> None:
    if _library is None:
        raise OSError(f"namespaces exist on Linux only, not on {sys.platform}")
    check(_library.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    assert _library is not None
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None)
    check(_library.mount(*arguments), f"mount {target}")


def unmount(target: str) -> None:
    assert _library is not None
    check(_library.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"no number of pivot_root is known for {machine}")
    check(syscall(PIVOT_ROOT[machine], new.encode(), old.encode()), "pivot_root")


def die_with_parent(parent: int) -> None:
    """Receive SIGKILL when the parent process ends; a change of user clears this, so call it after one."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(125)


def drop_capabilities() -> None:
    """Give up all capabilities for good, those of an own user namespace included."""
    for capability in range(LAST_CAPABILITY + 1):
        if prctl(PR_CAPBSET_DROP, capability) < 0:
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    assert _library is not None
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    check(_library.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def forbid_new_privileges() -> None:
    """Setuid programs and file capabilities have no effect from now on."""
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
