"""Landlock: a process gives up all file access but the one listed, and all TCP, for itself and its descendants.

Second lock behind the namespaces: a mount that is visible by mistake still cannot be written.
Kernel interface: linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from craton.ml.verifiers.sandbox import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
ALL_OF_VERSION_1 = (1 << 13) - 1
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15  # since versions 2, 3 and 5
FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
BIND_TCP_AND_CONNECT_TCP = 3  # since version 4
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3  # since version 6
RULE_PATH_BENEATH = 1
CREATE_RULESET_VERSION = 1


def landlock_version() -> int:
    """Return the version of the kernel's interface; 0 where Landlock is missing or turned off."""
    try:
        return max(0, kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION))
    except OSError:
        return 0


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow reading below some paths, and everything below others; nothing else. Needs no_new_privs."""
    version = landlock_version()
    handled = ALL_OF_VERSION_1
    handled |= REFER if version >= 2 else 0
    handled |= TRUNCATE if version >= 3 else 0
    handled |= IOCTL_DEVICE if version >= 5 else 0
    network = BIND_TCP_AND_CONNECT_TCP if version >= 4 else 0
    scoped = SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scoped)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = kernel.check(kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock")
    for path in readable:
        _allow(ruleset, path, handled & (EXECUTE | READ_FILE | READ_DIR))
    for path in writable:
        _allow(ruleset, path, handled)
    kernel.check(kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        access &= FILE_ONLY
    rule = struct.pack("=Qi", access, descriptor)
    kernel.check(kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0), f"landlock {path}")
    os.close(descriptor)
