"""What a user can get wrong about data, and what a disk can.

CratonError (ValueError)
└── DataError           a path, a file, a shard, a tokenizer or a user's source cannot be used
OSError
└── DiskFullError       no room left while shards were written; what had been written is gone again
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.errors import CratonError

MAX_PROBLEMS = 10


class DataError(CratonError):
    """The message says what was given, what is allowed and what to do; `.problems` are its lines."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a DataError needs at least one problem"
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[str, ...]]:
        """An error crosses from a worker to the process that asked."""
        return DataError, self.problems


class DiskFullError(OSError):
    """No room left; nothing half written stays behind."""


def first_problems(problems: Sequence[str], what: str) -> DataError:
    """One error for many lines of a file: the first ones, and how many more there are."""
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"{what}: and {len(problems) - MAX_PROBLEMS} more; mend these first")
    return DataError(*shown)
