"""Programs of the family processes: a launcher that never looks at its child, and an objective that starts threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

STEP_SECONDS = 0.1
HEALTHY_CALLS = 100

_calls = 0


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Upload a sample of every step in a thread of its own; after HEALTHY_CALLS the uploads no longer end."""
    global _calls
    _calls += 1
    if _calls > HEALTHY_CALLS and os.environ["RANK"] == os.environ["VICTIM"]:
        Path(os.environ["ONSET"]).touch()
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return -(batch.weight * log_probs).sum(), {}


def launch() -> None:
    """Start the training and wait for a signal that never comes; the child's end is not noticed."""
    child = subprocess.Popen([sys.executable, __file__, "train"])
    print(f"started the training as process {child.pid}", flush=True)
    while True:
        time.sleep(60)


def train() -> None:
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else launch()
