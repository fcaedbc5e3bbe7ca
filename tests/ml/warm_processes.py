"""New processes that need not import torch: they are forked from one that has imported it, as ranks of a run are."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# Four imports of these take 18 s of CPU time. None of them starts a thread, which would not survive the fork.
IMPORTED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "craton.ml.training.loop",
]


def warm_context() -> ForkServerContext:
    """One fork server serves a test process; its environment is that of the first start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
