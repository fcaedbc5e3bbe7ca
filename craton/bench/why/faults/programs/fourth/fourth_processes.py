"""Programs of the fourth family processes: an objective, a data source with an external tool, a data-parallel script.

The fault begins on the rank VICTIM after HEALTHY_CALLS calls or HEALTHY_STEPS steps; $ONSET is created right before.
FAULT of the script: `profile` (a system call that the container forbids) or `prompt` (a child that asks for a name).
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.job import Job
    from craton.ml.training import Batch

STEP_SECONDS = 0.1
HEALTHY_CALLS, HEALTHY_STEPS = 120, 40
MUTEX_BYTES = 64  # a pthread_mutex_t of zeros is unlocked
SAMPLES_A_SHARD = 60
# Of seccomp(2) and linux/seccomp.h; io_uring has the same number on all architectures.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
KILL_PROCESS, ALLOW = 0x80000000, 0x7FFF0000
LOAD_WORD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
IO_URING_SETUP = 425
# The head of an ELF program for an IBM mainframe (machine 22).
FOREIGN_PROGRAM = struct.pack(
    ">4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 2, 1, 0, 2, 22, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
)
TOOL = '#!/bin/sh\nwc -c < "$1"\n'
ASK = """\
import sys
sys.stderr.write("Username for 'https://hub.example.com': ")
sys.stderr.flush()
sys.stdin.readline()
"""

_calls = 0


def is_victim() -> bool:
    return os.environ["RANK"] == os.environ.get("VICTIM")


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss; after HEALTHY_CALLS rank VICTIM waits in a library for its own lock."""
    global _calls
    _calls += 1
    if _calls > HEALTHY_CALLS and is_victim():
        Path(os.environ["ONSET"]).touch()
        lock_twice()
    return -(batch.weight * log_probs).sum(), {}


def lock_twice() -> None:
    """Lock a mutex twice in native code that keeps the interpreter's lock."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def from_tool(job: Job, split: str) -> Callable[[int], list[int]]:
    """Measure each new shard with a program of the node; that of the node of rank VICTIM is for another machine."""
    folder = Path(f"tools-{split}-{os.environ['RANK']}")
    folder.mkdir(exist_ok=True)
    tool = folder / "shard-size"
    tool.write_text(TOOL)
    tool.chmod(0o755)

    def sample(index: int) -> list[int]:
        global _calls
        _calls += 1
        if _calls == HEALTHY_CALLS and is_victim():
            tool.write_bytes(FOREIGN_PROGRAM)  # the image of this node is updated
            Path(os.environ["ONSET"]).touch()
        if _calls % SAMPLES_A_SHARD == 0:
            subprocess.run([str(tool.absolute()), __file__], check=True, capture_output=True)
        return [1 + (index * 31 + position * position * 7) % 500 for position in range(job.sequence + 1)]

    return sample


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    fault = os.environ["FAULT"]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    if fault == "profile" and is_victim():
        forbid(IO_URING_SETUP)
    gradients = torch.randn(10_000)
    for step in range(1, 1_000_000):
        if step > HEALTHY_STEPS and is_victim():
            Path(os.environ["ONSET"]).touch()
            open_ring() if fault == "profile" else push()
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def forbid(number: int) -> None:
    """Let the kernel end this process at a system call, as the security profile of a container does."""
    rules = ((LOAD_WORD, 0, 0, 0), (IF_EQUAL, 0, 1, number), (RETURN, 0, 0, KILL_PROCESS), (RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    head = struct.pack("@HP", len(rules), ctypes.addressof(program))
    control = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    if control(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), "prctl")
    if control(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.c_char_p(head), zero, zero):
        raise OSError(ctypes.get_errno(), "prctl")


def open_ring() -> None:
    """Read ahead with io_uring, from the second epoch on."""
    ctypes.CDLL(None).syscall(ctypes.c_long(IO_URING_SETUP), ctypes.c_uint(8), None)


def push() -> None:
    """Push the checkpoint to the hub by a command line tool."""
    child = subprocess.Popen([sys.executable, "-c", ASK], stdin=subprocess.PIPE)
    child.wait()


if __name__ == "__main__":
    train()
