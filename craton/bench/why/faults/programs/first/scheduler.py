"""A command that reports its steps, for runs on Slurm."""

import time

step = 0
while True:
    time.sleep(0.3)
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
