"""A process that keeps state in memory in children it forks, so that many can be killed without importing torch anew.

Each line of standard input is one rank's life as JSON: keeper, buddy, generation, step, numbers. A child restores what
there is, says `PID restored STEP`, then takes a snapshot of every step and says `PID kept STEP` when it is whole.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from craton.ml.training.checkpoint import Checkpointer
from craton.ml.training.checkpoint.peer import PeerSetup

LAST_STEP = 10**9


def state_of(step: int, numbers: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((numbers,), float(step)) for name in ("model.a", "optimizer.exp_avg.a", "model.b")}


def live(work: dict[str, Any]) -> None:
    setup = PeerSetup(work["keeper"], "node-0", ["node-0"], {}, work["generation"], every_steps=1)
    checkpointer = Checkpointer([], 0, 1, setup)
    assert checkpointer._peer is not None
    tensors = state_of(0, work["numbers"])
    counters = checkpointer.restore(tensors)
    step = counters["step"] if counters else 0
    assert all(bool((tensor == step).all()) for tensor in tensors.values()), "a mixed state was restored"
    print(os.getpid(), "restored", step, flush=True)
    checkpointer.reserve(tensors, step)
    checkpointer._peer._buddy = work["buddy"]  # where a second node would be
    while step < LAST_STEP:
        step += 1
        for tensor in tensors.values():
            tensor.fill_(float(step))
        assert checkpointer.due(step)
        checkpointer.save(step, tensors, {"samples": step})
        if step > 1:
            print(os.getpid(), "kept", step - 1, flush=True)  # the one before is whole: this one could begin


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print(child, "ended 0", flush=True)


if __name__ == "__main__":
    main()
