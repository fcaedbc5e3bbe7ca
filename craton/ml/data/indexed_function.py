"""A user's function behind `data.source`: `function(job)` returns a callable that gives the item of a global index.

A function with a `split` parameter is also called for "validation". Errors name the function, the index and the line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from craton.job import Job
from craton.ml.data.errors import DataError
from craton.ml.functions import load_function


class IndexedFunction:
    """Items of a user's callable, by their index. `item`: what they are, in errors."""

    def __init__(self, name: str, give: Callable[[int], Any], item: str = "sample") -> None:
        self.name, self._give, self._item = name, give, item

    @classmethod
    def of_job(cls, job: Job, split: str, item: str, example: str) -> IndexedFunction:
        """Call the job's function for this split. `example` is a callable that it could return."""
        name = job.data.source
        assert name is not None
        function = load_function(name)
        takes_split = "split" in inspect.signature(function).parameters
        if split != "train" and not takes_split:
            raise DataError(
                f"data.source {name} provides training data only; write `def {name.partition(':')[2]}(job, split)` and "
                f'return other {item}s for split "validation", or set data.validation'
            )
        try:
            give = function(job, split=split) if takes_split else function(job)
        except Exception as error:
            raise DataError(f"data.source {name} raised {_described(error)}") from error
        if not callable(give):
            raise DataError(
                f"data.source {name} returned {type(give).__name__}; it must return a callable that takes a {item}'s "
                f"index, e.g. `return {example}`"
            )
        return cls(name, give, item)

    def place(self, index: int) -> str:
        """Return how errors name an item."""
        return f"data.source {self.name}: {self._item} {index}"

    def __call__(self, index: int) -> Any:
        try:
            return self._give(index)
        except Exception as error:
            raise DataError(f"{self.place(index)} raised {_described(error)}") from error


def _described(error: Exception) -> str:
    """Return `ValueError: text (file.py:12)`, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"
