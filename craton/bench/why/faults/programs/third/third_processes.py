"""Programs of the third family processes: a data-parallel script, an objective, and a tool that limits CPU use.

`third_processes.py` is the script; FAULT begins on the rank VICTIM after HEALTHY_STEPS. `… limit PID` stops and
continues a process in turn, as cpulimit does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

STEP_SECONDS = 0.1
HEALTHY_STEPS = 40
HEALTHY_CALLS = 100
STOPPED_SECONDS, RUNNING_SECONDS = 0.09, 0.01
UNKNOWN_INSTRUCTION = b"\x0f\x0b\xc3"  # ud2, ret: as an instruction that this CPU does not have
# Takes the lock of a build and is killed before the build ends.
KILLED_BUILD = """\
import os, signal, sys
from torch.utils.file_baton import FileBaton
FileBaton(sys.argv[1]).try_acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""

_calls = 0


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss; after HEALTHY_CALLS rank VICTIM takes the code path with its own kernel."""
    global _calls
    _calls += 1
    if _calls > HEALTHY_CALLS and os.environ["RANK"] == os.environ["VICTIM"]:
        Path(os.environ["ONSET"]).touch()
        fused_kernel()
    return -(batch.weight * log_probs).sum(), {}


def fused_kernel() -> None:
    """Run code that was compiled for another CPU."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(UNKNOWN_INSTRUCTION)
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    fault, is_victim = os.environ["FAULT"], os.environ["RANK"] == os.environ.get("VICTIM")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    if fault == "thread":
        threading.Thread(target=upload_logs).start()
    gradients = torch.randn(10_000)
    for step in range(1, 1_000_000):
        if step > HEALTHY_STEPS and is_victim:
            Path(os.environ["ONSET"]).touch()
            load_extension() if fault == "lock" else collate(torch)
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        if torch.distributed.get_rank() == 0 or "GROUP_RANK" not in os.environ:  # below torchrun, one worker prints
            print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


def load_extension() -> None:
    """Load an extension whose last build was killed: wait for its lock, as torch.utils.cpp_extension.load does."""
    from torch.utils.file_baton import FileBaton

    lock = f"extensions-{os.environ['RANK']}.lock"
    subprocess.run([sys.executable, "-c", KILLED_BUILD, lock], check=False)
    baton = FileBaton(lock)
    if not baton.try_acquire():
        baton.wait()


def collate(torch: Any) -> None:
    """Stack samples of different lengths."""
    torch.stack([torch.zeros(64), torch.zeros(63)])


def upload_logs() -> None:
    """Upload the logs for as long as the process lives."""
    while True:
        time.sleep(5)


def limit(pid: int) -> None:
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
        time.sleep(RUNNING_SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["limit"]:
        limit(int(sys.argv[2]))
    train()
