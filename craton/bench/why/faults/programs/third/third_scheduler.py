"""A command of the third set that reports its steps, for runs on Slurm. With FAULT `step` it evaluates with srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEP_SECONDS = 0.3
EVALUATE_AT = 40


def train() -> None:
    for step in range(1, 1_000_000):
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {1 / step:.4f}", flush=True)
        if os.environ.get("FAULT") == "step" and step == EVALUATE_AT and os.environ["RANK"] == "0":
            evaluate()


def evaluate() -> None:
    """Evaluate in a step of its own on one node of the job."""
    Path(os.environ["ONSET"]).touch()
    subprocess.run(["srun", "--nodes=1", "--ntasks=1", "--exclusive", "hostname"], check=True)


def end(number: int, frame: object) -> None:
    """Slurm ends the job."""
    Path(os.environ["ONSET"]).touch()
    sys.exit(128 + number)


if __name__ == "__main__":
    if "FAULT" not in os.environ:
        signal.signal(signal.SIGTERM, end)
    train()
