"""A command whose lease is checked against the wall clock: it renews it every step, and raises when it has expired."""

import os
import time

rank, lease_until = os.environ["RANK"], time.time() + 60
step = 0
while True:
    time.sleep(0.2)
    step += 1
    if time.time() > lease_until:
        raise TimeoutError(f"the lease of worker {rank} expired {time.time() - lease_until:.0f} seconds ago")
    lease_until = time.time() + 60
    print(f"step {step} loss {1 / step:.4f}", flush=True)
