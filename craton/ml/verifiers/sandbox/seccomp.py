"""A filter of system calls: what would hold memory that is not counted, or open new namespaces, fails in the sandbox.

The filter is a program of the kernel's classic BPF (linux/filter.h): it compares the number of a call with those that
fail. Calls of other architectures (32-bit ones) end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from craton.ml.verifiers.sandbox import kernel

# linux/seccomp.h, linux/audit.h, linux/bpf_common.h
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RETURN_KILL, RETURN_ERROR, RETURN_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FLAGS_OFFSET = 0, 4, 16  # of the call's number, and of its first argument
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_IF_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
FOREIGN_CALLS = 0x40000000  # x32 calls of x86_64 begin here

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Denied with EPERM. Shared memory that no process maps, and memory of other namespaces, is seen by no count of ours.
DENIED = {
    "x86_64": {
        "memfd_create": 319,
        "memfd_secret": 447,
        "shmget": 29,
        "msgget": 68,
        "semget": 64,
        "unshare": 272,
        "setns": 308,
        "mount": 165,
        "ptrace": 101,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "memfd_create": 279,
        "memfd_secret": 447,
        "shmget": 194,
        "msgget": 186,
        "semget": 190,
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "ptrace": 117,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "io_uring_setup": 425,
    },
}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags lie in memory, which a filter cannot read; libraries fall back to clone
NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)


def filter_program() -> bytes:
    """Return the filter for this machine; empty where its system calls are not known."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return b""
    denied, clone = sorted(DENIED[machine].values()), CLONE[machine]
    # (code, where to go on if true, if false, value); the ends are the last four instructions.
    ends = [
        (RETURN, RETURN_ALLOW),
        (RETURN, RETURN_ERROR | errno.EPERM),
        (RETURN, RETURN_ERROR | errno.ENOSYS),
        (RETURN, RETURN_KILL),
    ]
    checks: list[tuple[int, str, str, int]] = [
        (LOAD, "", "", ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, "next", "kill", ARCHITECTURES[machine]),
        (LOAD, "", "", NUMBER_OFFSET),
        *([(JUMP_AT_LEAST, "kill", "next", FOREIGN_CALLS)] if machine == "x86_64" else []),
        (JUMP_EQUAL, "missing", "next", CLONE3),
        *((JUMP_EQUAL, "denied", "next", number) for number in denied),
        (JUMP_EQUAL, "next", "allowed", clone),
        (LOAD, "", "", FLAGS_OFFSET),
        (JUMP_IF_BITS, "denied", "allowed", NEW_NAMESPACES),
    ]
    places = {name: len(checks) + place for place, name in enumerate(("allowed", "denied", "missing", "kill"))}
    program = b""
    for number, (code, if_true, if_false, value) in enumerate(checks):
        jumps = [0 if where in ("", "next") else places[where] - number - 1 for where in (if_true, if_false)]
        program += struct.pack("=HBBI", code, *jumps, value)
    return program + b"".join(struct.pack("=HBBI", code, 0, 0, value) for code, value in ends)


def filter_descriptor() -> int | None:
    """Return a file descriptor from which bubblewrap reads the filter; None without one."""
    program = filter_program()
    if not program:
        return None
    reading, writing = os.pipe()
    os.write(writing, program)
    os.close(writing)
    os.set_inheritable(reading, True)
    return reading


def apply_filter() -> None:
    """Filter the system calls of this process and its descendants. It must not be able to get new privileges."""
    program = filter_program()
    if not program:
        return
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    kernel.check(kernel.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(pointer)), "prctl(PR_SET_SECCOMP)")
