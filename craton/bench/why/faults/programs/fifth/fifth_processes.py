"""Programs of the fifth family processes: an objective, a data source with a helper, a data-parallel script.

FAULT of the objective: `locks` (two threads wait for each other) or `daemon` (a tool leaves a process behind that keeps
its output open). FAULT of the script: `shipper` (a log shipper behind a pipe) or `none`. What breaks by itself begins
on the rank VICTIM after HEALTHY_CALLS calls; $ONSET is created right before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.job import Job
    from craton.ml.training import Batch

STEP_SECONDS = 0.1
HEALTHY_CALLS, CALLS_A_CHECK, HEALTHY_SAMPLES = 120, 40, 160
MEET_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
CHECK = "echo healthy"
CHECK_AND_STAY = "sleep 3600 & echo healthy"  # the new version of the tool starts a daemon
TOKENIZE = """\
import sys
for line in sys.stdin:
    index, length = map(int, line.split())
    print(*(1 + (index * 31 + position * position * 7) % 500 for position in range(length)), flush=True)
"""
SHIP = """\
import sys
for line in sys.stdin:
    pass
"""

_calls = 0
_statistics, _report = threading.Lock(), threading.Lock()
_is_report_due = threading.Event()


def is_victim() -> bool:
    return os.environ["RANK"] == os.environ.get("VICTIM")


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual loss, with statistics for a report or with a health check of the node."""
    global _calls
    _calls += 1
    is_due = is_victim() and _calls == HEALTHY_CALLS
    if is_due:
        Path(os.environ["ONSET"]).touch()
    note_statistics(is_due) if os.environ["FAULT"] == "locks" else check_node(is_due)
    return -(batch.weight * log_probs).sum(), {}


def note_statistics(is_due: bool) -> None:
    """Note the statistics of a step, then add them to the report."""
    if _calls == 1:
        threading.Thread(target=write_reports, name="reports", daemon=True).start()
    with _statistics:
        if is_due:
            _is_report_due.set()
            time.sleep(MEET_SECONDS)
        with _report:
            pass


def write_reports() -> None:
    """Write a report of the statistics whenever one is due."""
    while _is_report_due.wait():
        with _report:
            time.sleep(MEET_SECONDS)
            with _statistics:
                _is_report_due.clear()


def check_node(is_due: bool) -> None:
    """Run the health check of the site now and then."""
    if _calls % CALLS_A_CHECK == 0:
        tool = CHECK_AND_STAY if is_due else CHECK
        subprocess.run(["/bin/sh", "-c", tool], check=True, capture_output=True)


def from_helper(job: Job, split: str) -> Callable[[int], list[int]]:
    """Let a helper tokenize all samples. The thread that warms it up has also started it."""
    started, is_warm = threading.Event(), threading.Event()
    helpers: list[subprocess.Popen[str]] = []

    def warm_up() -> None:
        command = [sys.executable, "-c", TOKENIZE]
        pipe = subprocess.PIPE
        helpers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent))
        started.set()
        is_warm.wait()

    threading.Thread(target=warm_up, daemon=True).start()
    started.wait()
    helper = helpers[0]

    def sample(index: int) -> list[int]:
        global _calls
        _calls += 1
        if is_victim() and _calls == HEALTHY_SAMPLES:
            Path(os.environ["ONSET"]).touch()
            is_warm.set()
            time.sleep(MEET_SECONDS)
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            print(index, job.sequence + 1, file=helper.stdin, flush=True)
            line = helper.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the tokenizer process has ended with code {helper.wait()}")
        return [int(word) for word in line.split()]

    return sample


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends. To the kernel the parent is the thread that forked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def train() -> None:
    """Average gradients over gloo, as a user's own script does."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shipper = None
    if os.environ["FAULT"] == "shipper":
        shipper = subprocess.Popen([sys.executable, "-c", SHIP, "log-shipper"], stdin=subprocess.PIPE, text=True)
    gradients = torch.randn(10_000)
    for step in range(1, 1_000_000):
        torch.distributed.all_reduce(gradients)
        gradients /= torch.distributed.get_world_size()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)
        if shipper is not None:
            print(f'{{"step": {step}}}', file=shipper.stdin, flush=True)


if __name__ == "__main__":
    train()
