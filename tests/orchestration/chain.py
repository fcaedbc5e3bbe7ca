"""A rank whose loss depends on every step before it, so that a step that is lost or done twice is seen in the last one.

It needs no torch: its state is a chain of hashes. Rank 0 saves it every few steps, and on SIGTERM before it leaves.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time

from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder

SAVE_EVERY = 10


def next_state(state: bytes, step: int) -> bytes:
    return hashlib.sha256(state + step.to_bytes(8)).digest()


def loss_of(state: bytes) -> float:
    return int.from_bytes(state[:6]) / 2**48


def losses(steps: int) -> dict[int, float]:
    """Step → loss of a run that nothing happens to."""
    found, state = {}, b""
    for step in range(1, steps + 1):
        state = next_state(state, step)
        found[step] = loss_of(state)
    return found


def main() -> None:
    run, rank = RunDirectory(os.environ["CRATON_RUN"]), int(os.environ["RANK"])
    steps, seconds = int(os.environ["STEPS"]), float(os.environ["STEP_SECONDS"])
    recorder, clock = Recorder.from_environment(), LedgerClock()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    folder = run.checkpoints("shared")
    saved = sorted(folder.glob("step-*/COMPLETE"))
    step = int(saved[-1].parent.name.removeprefix("step-")) if saved else 0
    state = (saved[-1].parent / "state").read_bytes() if saved else b""
    print(f"rank {rank} goes on after step {step}", flush=True)
    print(f"a token of {len(os.environ.get('LAB_TOKEN', ''))} letters", flush=True)
    clock.switch("productive")
    while step < steps and not told:
        time.sleep(seconds)
        step += 1
        state = next_state(state, step)
        if rank == 0:
            recorder.metrics(step, run_loss=loss_of(state), run_step_seconds=seconds)
        recorder.ledger(step, clock.take())
        if rank == 0 and (step % SAVE_EVERY == 0 or step == steps or told):
            save(run, step, state)
    print(f"rank {rank} leaves after step {step}", flush=True)


def save(run: RunDirectory, step: int, state: bytes) -> None:
    folder = run.checkpoints("shared") / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").write_bytes(state)
    (folder / "COMPLETE").touch()


if __name__ == "__main__":
    main()
