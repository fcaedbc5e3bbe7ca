"""Programs of the family cpu: an objective whose worker processes outlive their work and spin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from craton.ml.training import Batch

HEALTHY_CALLS = 100
WORKERS = 5

_calls = 0


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss; start a new pool of workers for scores after HEALTHY_CALLS, and never end it."""
    global _calls
    _calls += 1
    if _calls == HEALTHY_CALLS:
        for _ in range(WORKERS):
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
        Path(os.environ["ONSET"]).touch()
    return -(batch.weight * log_probs).sum(), {}
