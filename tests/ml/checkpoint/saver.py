"""A process that saves in children it forks, so that many of them can be killed without importing torch each time.

Each line of standard input is one save as JSON: tier (arguments of TierFolder), step, numbers, environment. A child
says its process number, `began` and, if it lives that long, `done SECONDS`; when it is gone, the parent says `ended`.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from craton.infrastructure.storage import s3
from craton.ml.training.checkpoint import Checkpointer, TierFolder

PART_BYTES = 5 * 2**20  # the smallest that S3 takes, so that small states go in several parts


def state_of(step: int, numbers: int) -> dict[str, torch.Tensor]:
    first = torch.arange(numbers, dtype=torch.float32) + step
    return {"model.a": first, "optimizer.exp_avg.a": -first}


def main() -> None:
    torch.set_num_threads(1)
    s3.PART_BYTES = PART_BYTES
    for line in sys.stdin:
        work = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(work["environment"])
            checkpointer = Checkpointer([TierFolder(**work["tier"])], 0, 1)
            tensors = state_of(work["step"], work["numbers"])
            print(os.getpid(), "began", flush=True)
            began = time.perf_counter()
            checkpointer.save(work["step"], tensors, {"samples": work["step"] * 8})
            checkpointer.wait()
            print(os.getpid(), "done", time.perf_counter() - began, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(child, "ended", flush=True)


if __name__ == "__main__":
    main()
