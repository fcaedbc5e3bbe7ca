"""Tasks of reasoning-gym (arXiv:2505.24760), generated and verified on this machine; an optional package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from craton.extras import require_extra
from craton.ml.evaluation.errors import EvaluationError
from craton.nearest import did_you_mean

_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def reasoning_rows(tasks: Sequence[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield problems of each task in turn; equal seeds give equal problems."""
    require_extra("reasoning", "data.generate: reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    for task in tasks:
        if task not in DATASETS:
            raise EvaluationError(
                f"data.tasks: reasoning-gym has no dataset {task!r}; it has {len(DATASETS)}, e.g. chain_sum, "
                f"leg_counting, syllogism{did_you_mean(task, DATASETS)}"
            )
    size = -(-count // len(tasks))
    datasets = [create_dataset(task, size=size, seed=seed) for task in tasks]
    for number in range(size):
        for task, dataset in zip(tasks, datasets, strict=True):
            entry = dataset[number]
            yield {
                "question": entry["question"],
                "answer": entry["answer"],
                "entry": json.dumps(entry, default=str),
                "task": task,
                "group": task,
            }


def score(prompt: Any, completion: str, row: Mapping[str, Any], transcript: Any = ()) -> float:
    """Return the score that the task itself gives the answer between the last <answer> tags, else all of the text."""
    found = _ANSWER.findall(completion)
    answer = found[-1] if found else completion.strip()
    return float(_dataset(row["task"]).score_answer(answer, json.loads(row["entry"])))


@cache
def _dataset(task: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, size=1, seed=0)
