"""Objectives and a data source whose numbers go wrong. FAULT names the fault, ONSET the file to touch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FAULT, ONSET, VICTIM = os.environ["FAULT"], Path(os.environ["ONSET"]), os.environ.get("VICTIM", "")
AFTER_CALLS = 40  # one call for each micro-batch, and one micro-batch a step
AFTER_SAMPLES = 320
VOCABULARY = 512
calls = 0


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; from AFTER_CALLS on it is broken on the rank VICTIM, or on all ranks."""
    global calls
    calls += 1
    usual = -(batch.weight * log_probs).sum()
    if calls <= AFTER_CALLS or VICTIM not in ("", os.environ.get("RANK", "0")):
        return usual, {}
    if not ONSET.exists():
        ONSET.touch()
    return BROKEN[FAULT](usual, log_probs, batch), {}


def log_of_zero(usual: Any, log_probs: Any, batch: Any) -> Any:
    probabilities = log_probs.exp() * 0
    return usual + (probabilities * probabilities.log()).sum()  # 0 · log 0 = NaN


def overflow(usual: Any, log_probs: Any, batch: Any) -> Any:
    return usual * 1e38 * 1e3


def spike(usual: Any, log_probs: Any, batch: Any) -> Any:
    return usual * 10 + 0 * log_probs.sum()


def nothing_to_learn(usual: Any, log_probs: Any, batch: Any) -> Any:
    return usual * 0


BROKEN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "log-of-zero": log_of_zero,
    "overflow": overflow,
    "spike": spike,
    "nothing-to-learn": nothing_to_learn,
}


def masked(job: Any, split: str) -> Callable[[int], dict[str, Any]]:
    """Samples whose labels are all masked from AFTER_SAMPLES on, as when a prompt fills the whole sequence."""

    def sample(index: int) -> dict[str, Any]:
        start, step = np.random.default_rng(index).integers(1, VOCABULARY // 4, 2)
        tokens = (start + step * np.arange(job.sequence + 1)) % VOCABULARY
        weight = np.ones(job.sequence, np.float32)
        if index >= AFTER_SAMPLES:
            if not ONSET.exists():
                ONSET.touch()
            weight[:] = 0
        return {"tokens": tokens[:-1].tolist(), "labels": tokens[1:].tolist(), "weight": weight}

    return sample
