"""Preference pairs: `data.source: addition_pairs:pairs` in examples/dpo.yaml.

`pairs(job, split)` returns a function of the index: a row with a prompt, a chosen and a rejected completion, as it
would stand in a line of JSONL. Here: sums with the right answer, and one in which a digit is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from addition import sum_of

from craton.job import Job


def pairs(job: Job, split: str = "train") -> Callable[[int], dict[str, str]]:
    """Return pairs of a right and a wrong answer to a sum."""

    def pair(index: int) -> dict[str, str]:
        given = sum_of(index, split)
        return {"prompt": given["question"], "chosen": given["answer"], "rejected": wrong(given["answer"], index)}

    return pair


def wrong(answer: str, index: int) -> str:
    """Return the answer with another digit at one place."""
    draw = random.Random(-1 - index)
    place = draw.randrange(len(answer))
    digit = (int(answer[place]) + draw.randrange(1, 10)) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"
