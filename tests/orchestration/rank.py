"""A rank that needs no torch: it counts steps, records them, checkpoints on SIGTERM, and goes on from a checkpoint.
With SAVE_EVERY it also saves after so many steps, and its agent sees its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder, own_page


def save(run: RunDirectory, step: int) -> None:
    folder = run.checkpoints("shared") / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMPLETE").touch()


def main() -> None:
    run, rank = RunDirectory(os.environ["CRATON_RUN"]), int(os.environ["RANK"])
    steps, seconds = int(os.environ.get("STEPS", "5")), float(os.environ.get("STEP_SECONDS", "0.02"))
    every, page = int(os.environ.get("SAVE_EVERY", "0")), own_page()
    recorder, clock = Recorder.from_environment(), LedgerClock()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    if os.environ.get("CHILD"):
        subprocess.Popen(["sleep", os.environ["CHILD"]])
    saved = sorted(run.checkpoints("shared").glob("step-*/COMPLETE"))
    step = int(saved[-1].parent.name.removeprefix("step-")) if saved else 0
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} starts after step {step}", flush=True)
    clock.switch("productive")
    while step < steps and not told:
        time.sleep(seconds)
        step += 1
        if rank == int(os.environ.get("FAIL_RANK", "-1")):
            sys.exit("the reward function broke")
        if rank == 0:
            loss = 4.0 - 3.0 * step / steps
            recorder.metrics(step, run_loss=loss, run_step_seconds=seconds, run_tokens_per_second=1000.0 / seconds)
        recorder.ledger(step, clock.take())
        if every and page is not None:
            page.step = step
        if rank == 0 and every and step % every == 0:
            save(run, step)
    if rank == 0:
        save(run, step)
        recorder.event("checkpoint_saved", step=step, tier="shared")
    print(f"rank {rank} leaves after step {step}", flush=True)


if __name__ == "__main__":
    main()
