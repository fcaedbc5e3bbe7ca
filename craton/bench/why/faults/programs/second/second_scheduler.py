"""A command of the second set that reports its steps, for runs on Slurm."""

import time

for step in range(1, 1_000_000):
    time.sleep(0.3)
    print(f"step {step} loss {1 / step:.4f}", flush=True)
