"""Custom data: `data.source: custom_source:sums` in examples/custom-source.yaml.

`sums(job, split)` returns a function of the global sample index. It must return the same sample for the same index, so
that a stopped run resumes exactly, on any number of ranks. Here: additions, with the loss on the answers only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from craton.job import Job

SYMBOLS = "0123456789+= "
LARGEST = 99


def sums(job: Job, split: str) -> Callable[[int], dict[str, Any]]:
    """Return samples of additions such as `17+25=42`; the validation split uses another random stream."""

    def sample(index: int) -> dict[str, Any]:
        random = np.random.default_rng([split == "validation", index])
        tokens: list[int] = []
        answer: list[bool] = []
        while len(tokens) <= job.sequence:
            first, second = random.integers(0, LARGEST + 1, 2)
            question, result = f"{first}+{second}=", f"{first + second} "
            tokens += [SYMBOLS.index(symbol) for symbol in question + result]
            answer += [False] * len(question) + [True] * len(result)
        return {
            "tokens": tokens[: job.sequence],
            "labels": tokens[1 : job.sequence + 1],
            "weight": np.array(answer[1 : job.sequence + 1], np.float32),
        }

    return sample
