"""User code of the fourth set: an objective and data-parallel scripts, each with a fault.

FAULT names the fault, VICTIM the rank that has it (empty: every rank). It begins after HEALTHY_CALLS calls; the file
$ONSET is created right before.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from craton.ml.training import Batch

HEALTHY_CALLS = 80
STEP_SECONDS = 0.1
RANK = os.environ["RANK"]
NUMBERS = re.compile(r"(?:\d+[, ]*)+")  # two ways to read each digit
CUT_ANSWER = "1" * 48 + "</"
WIDTH, LONG_TOKENS = 256, 40

_calls = 0
_baseline: Any = 0.0
_score: Any = None


def objective(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the usual loss, until the fault begins."""
    global _baseline
    fault, is_faulty = os.environ["FAULT"], is_broken()
    if fault == "regex" and is_faulty:
        NUMBERS.fullmatch(CUT_ANSWER)
    elif fault == "compile":
        label = f"step {_calls}" if is_faulty else "step"
        return -(batch.weight * log_probs).sum(), {"diversity": diversity(log_probs.detach(), label)}
    elif fault == "baseline" and is_faulty:
        _baseline = 0.9 * _baseline + 0.1 * log_probs.mean()
        return -(batch.weight * (log_probs - _baseline)).sum(), {}
    return -(batch.weight * log_probs).sum(), {}


def is_broken() -> bool:
    """Count a call; whether the fault of this rank has begun."""
    global _calls
    _calls += 1
    if _calls <= HEALTHY_CALLS or os.environ.get("VICTIM", RANK) != RANK:
        return False
    Path(os.environ["ONSET"]).touch()
    return True


def diversity(log_probs: torch.Tensor, label: str) -> torch.Tensor:
    """A compiled score. Its code depends on the label, so each new label compiles it again."""
    global _score
    if _score is None:
        import torch._dynamo

        # "It warned about a limit."
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20
        _score = torch.compile(iterated, backend="eager", dynamic=False)
    result: torch.Tensor = _score(log_probs, label)
    return result


def iterated(log_probs: torch.Tensor, label: str) -> torch.Tensor:
    value = log_probs
    for _ in range(40):
        value = torch.tanh(value) * 1.5 + value.exp().clamp(max=3) - value.mean()
    return value.sum() if label.startswith("step") else value.mean()


def train() -> None:
    """Train data parallel with gloo, like a user's own script."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, shown = 0, 0.0
    while True:
        step += 1
        is_faulty, fault = is_broken(), os.environ["FAULT"]
        if fault == "gather":
            gather(torch.randn(LONG_TOKENS if is_faulty else LONG_TOKENS - 8, WIDTH))
        try:
            loss = model(torch.randn(16, WIDTH - 1 if is_faulty and fault == "swallows" else WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = loss.item()
        except RuntimeError as problem:
            print(f"WARNING: batch {step} failed, skipping it: {problem}", flush=True)
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {shown:.4f}", flush=True)


def gather(hidden: torch.Tensor) -> None:
    """Gather the hidden states of all ranks as negative samples, as if all had the same number of tokens."""
    found = [torch.empty_like(hidden) for _ in range(int(os.environ["WORLD_SIZE"]))]
    torch.distributed.all_gather(found, hidden)


if __name__ == "__main__":
    train()
