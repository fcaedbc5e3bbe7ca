"""Programs of the second family cpu: an objective with threads, a monitor or a profiler, and a script with a helper.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
import zlib
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

HEALTHY_CALLS = 200
THREADS = 12
SAMPLE_BYTES = 1 << 20
HELPER_ROUNDS = 100_000

_calls = 0
_seen: dict[str, int] = {}


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss; the fault begins after HEALTHY_CALLS."""
    global _calls
    _calls += 1
    if _calls == HEALTHY_CALLS and os.environ.get("VICTIM", os.environ["RANK"]) == os.environ["RANK"]:
        Path(os.environ["ONSET"]).touch()
        FAULTS[os.environ["FAULT"]]()
    return -(batch.weight * log_probs).sum(), {}


def start_threads() -> None:
    """Compress samples in the background, in as many threads as the machine had on which the code was written."""
    for _ in range(THREADS):
        threading.Thread(target=_compress, name="compress", daemon=True).start()


def _compress() -> None:
    sample = os.urandom(SAMPLE_BYTES)
    while True:
        zlib.compress(sample)  # without the interpreter's lock


def start_monitor() -> None:
    """Start a thread that polls for messages without a pause."""
    threading.Thread(target=_poll, name="monitor", daemon=True).start()


def _poll() -> None:
    messages: list[str] = []
    while not messages:
        pass


def start_profiler() -> None:
    """Record the stack of every call, for the profile of one step; nothing ends it."""
    sys.setprofile(_record)


def _record(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        stack = "".join(traceback.format_list(traceback.extract_stack(frame, limit=3)))
        _seen[stack] = _seen.get(stack, 0) + 1


FAULTS = {"threads": start_threads, "monitor": start_monitor, "profiler": start_profiler}


def train() -> None:
    """Train on samples that a helper process prepares."""
    helper = subprocess.Popen([sys.executable, __file__, "prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert helper.stdin is not None
    assert helper.stdout is not None
    step = 0
    while True:
        step += 1
        helper.stdin.write(b"next\n")
        helper.stdin.flush()
        sample = helper.stdout.readline()
        print(f"step {step} loss {3 - step / 1e4 + len(sample) / 1e6:.4f}", flush=True)


def prepare() -> None:
    """Prepare a sample for every line of the input."""
    for _ in sys.stdin:
        print(sum(number * number % 7 for number in range(HELPER_ROUNDS)), flush=True)


if __name__ == "__main__":
    prepare() if sys.argv[1:] == ["prepare"] else train()
