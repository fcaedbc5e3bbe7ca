"""A rank that needs no torch and trains in lock-step with the others, as far as its records show.

Every rank knows how long each of them works in a step, so that it can say how long it waited for the slowest without
being told. What goes wrong is in the environment: VICTIM is the rank, FAULT what it does after step 12.
"""

from __future__ import annotations

import os
import sys
import time

from craton.telemetry.rank import LedgerClock, Recorder

WORK_SECONDS, OPTIMIZER_SECONDS, MIN_WAIT_SECONDS = 0.02, 0.001, 0.002
HEALTHY_STEPS = 12


def main() -> None:
    rank, victim = int(os.environ["RANK"]), int(os.environ.get("VICTIM", "-1"))
    fault, steps = os.environ.get("FAULT", ""), int(os.environ.get("STEPS", "100000"))
    recorder, clock = Recorder.from_environment(), LedgerClock()
    for step in range(1, steps + 1):
        is_sick = bool(fault) and step > HEALTHY_STEPS
        if is_sick and rank == victim and fault == "raise":
            raise ValueError("the reward function broke")
        if is_sick and rank == victim and fault == "disk":
            raise OSError(28, "No space left on device", "/scratch/batch")
        clock.switch("productive")
        clock.begin_step(step)
        slow = 3.0 if is_sick and fault == "slow" else 1.0
        mine = WORK_SECONDS * (slow if rank == victim else 1.0)
        slowest = WORK_SECONDS * slow
        time.sleep(slowest)
        loss = float("nan") if is_sick and fault == "nan" else 3.0 - 0.001 * step
        waited = slowest - mine + MIN_WAIT_SECONDS
        recorder.metrics(
            step,
            run_step_seconds=mine + waited + OPTIMIZER_SECONDS,
            run_data_seconds=0.0,
            run_compute_seconds=mine,
            run_communication_seconds=waited,
            run_optimizer_seconds=OPTIMIZER_SECONDS,
            run_checkpoint_seconds=0.0,
            run_loss=loss,
        )
        if clock.page is not None:
            clock.page.step_seconds = slowest


if __name__ == "__main__":
    sys.exit(main())
