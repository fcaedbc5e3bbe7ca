"""Errors about data: user errors, and full disks.

CratonError (ValueError)
└── DataError           a path, a file, a shard, a tokenizer or a user's source cannot be used
OSError
└── DiskFullError       no space left while shards were written; the partial output is removed
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.errors import CratonError

MAX_PROBLEMS = 10


class DataError(CratonError):
    """The message gives the value, what is allowed and what to do; `.problems` holds its lines."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a DataError needs at least one problem"
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[str, ...]]:
        """Pickle support: the error passes from a worker to its parent process."""
        return DataError, self.problems


class DiskFullError(OSError):
    """No space left; no partial output stays behind."""


def first_problems(problems: Sequence[str], what: str) -> DataError:
    """Return one error for many lines of a file: the first ones, and how many more there are."""
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"{what}: and {len(problems) - MAX_PROBLEMS} more; fix these first")
    return DataError(*shown)
