"""Sums as texts and as prompts, with the digits of the answer reversed: 47+5= is answered with 25, for 52.

Reversed, each digit of the answer follows from two digits of the sum and a carry, so a small model can learn it. Such
data needs no file: every sum is a function of its index. A sum of one split is never in another.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from craton.job import Job

SPLITS = {"base": 0, "train": 1, "validation": 2}  # a sum belongs to one of three parts


MISTAKES = 0.4  # share of the texts to start with whose answer is wrong by one


def texts(job: Job) -> Callable[[int], dict[str, str]]:
    """Sums to start with, some of them wrong, so that there is something to improve; only the answers are learnt."""

    def text(index: int) -> dict[str, str]:
        question, answer = sum_of(index, "base").values()
        is_wrong = random.Random(index + 1).random() < MISTAKES
        return {"prompt": question, "completion": str(int(answer[::-1]) + is_wrong)[::-1]}

    return text


def prompts(job: Job, split: str = "train") -> Callable[[int], dict[str, str]]:
    """Prompts of reinforcement learning, with the answer for the verifier."""
    return lambda index: {"prompt": sum_of(index, split)["question"], "answer": sum_of(index, split)["answer"]}


def sum_of(index: int, split: str) -> dict[str, str]:
    """Return the sum of an index: the first of its random ones that belongs to the split."""
    draw = random.Random(index)
    while True:
        first, second = draw.randrange(10, 100), draw.randrange(10)
        if (first * 10 + second) % 7 % len(SPLITS) == SPLITS[split]:
            return {"question": f"{first}+{second}=", "answer": str(first + second)[::-1]}
