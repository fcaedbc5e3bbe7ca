"""Which of the reported errors is the root cause: the first by time that is not the consequence of another one.

Ranks that only lost their connection are echoes. A rank that exited with 0 before the run was done counts if the others
reported nothing but echoes. An error that ends every generation in the same way explains a restart loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.observability.diagnosis.similar_text import without_numbers
from craton.observability.diagnosis.snapshot import RankError, Snapshot

REPEATED_SHARE = 0.75  # of the newest generations that must end with the same error


def first_error(snapshot: Snapshot) -> RankError | None:
    """Return the root cause of the end of the newest generation; None if no rank reported one."""
    return first_of([error for error in snapshot.errors if error.generation == snapshot.run.generation])


def first_of(errors: Sequence[RankError]) -> RankError | None:
    """Return the root cause among the errors of one generation."""
    own = sorted((error for error in errors if not error.is_echo), key=lambda error: error.moment)
    reports = [error for error in own if not error.is_early]
    words = [error for error in reports if error.type or error.message or error.out_of_memory]
    # A process that a signal from outside ended leaves no words; those that lost it may.
    silent = [error for error in reports if error not in words]
    if silent and words and silent[0].moment < words[0].moment and not any(error.type for error in words):
        return silent[0]
    return next(iter(words or reports or own), None)


def repeated_error(snapshot: Snapshot) -> tuple[RankError, int] | None:
    """Return the newest of the errors that ended the last generations in the same way, and how often it did."""
    numbers = sorted({error.generation for error in snapshot.errors})
    roots = [
        root
        for number in numbers
        if (root := first_of([error for error in snapshot.errors if error.generation == number])) is not None
    ]
    if not roots:
        return None
    same = [root for root in roots if _kind(root) == _kind(roots[-1])]
    return (roots[-1], len(same)) if len(same) >= REPEATED_SHARE * len(roots) else None


def _kind(error: RankError) -> tuple[object, ...]:
    message = without_numbers(error.message)
    return error.type, message, error.user_frame.partition(":")[0], error.code if not message else None
