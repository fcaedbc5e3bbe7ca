"""Synthetic data without files: `data: {source: "craton.ml.data.patterns:walks"}`, to rehearse a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from craton.job import Job


def walks(job: Job, split: str) -> Callable[[int], dict[str, Any]]:
    """Return rows that count up, each by its own step, so that there is something to learn."""
    shape = job.model_shape
    vocabulary = shape.vocab if shape is not None else 16

    def sample(index: int) -> dict[str, Any]:
        random = np.random.default_rng([split == "validation", index])
        first, step = random.integers(0, vocabulary), random.integers(1, 4)
        row = (first + step * np.arange(job.sequence + 1)) % vocabulary
        return {"tokens": row[:-1], "labels": row[1:], "weight": np.ones(job.sequence, np.float32)}

    return sample
