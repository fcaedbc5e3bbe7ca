"""A command of the fifth set that reports its steps, for runs on Slurm."""

import time

STEP_SECONDS = 0.3

for step in range(1, 1_000_000):
    time.sleep(STEP_SECONDS)
    print(f"step {step} loss {2 - step / 1e5:.4f}", flush=True)
