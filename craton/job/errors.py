"""Errors a user can cause and mend; the CLI prints each as one line and exits with 2.

CratonError(ValueError)            the root: every package's own tree hangs below it
└── JobError                       a job file, a cluster file or a model cannot be used
    ├── FileError                  the file cannot be read as YAML at all (missing, too large, duplicate key, ...)
    ├── ContentError               it is YAML, but keys or values are wrong; `.problems` lists every one
    ├── ModelError                 a model name, folder or config.json cannot be understood
    ├── LayoutError                a layout does not fit the model, the batch or the number of GPUs
    └── FaultError                 a fault to be made on purpose cannot be understood, or cannot happen in this run
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from craton.errors import CratonError


class JobError(CratonError):
    """A job file, a cluster file or a model cannot be used."""


class FileError(JobError):
    """The file cannot be read as YAML at all."""


class ContentError(JobError):
    """Keys or values of a file are wrong. Each problem is one line `file:line: ...`."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ContentError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ModelError(JobError):
    """A model name, folder or config.json cannot be understood."""


class LayoutError(JobError):
    """A layout does not fit the model, the batch or the number of GPUs."""


class FaultError(JobError):
    """A fault to be made on purpose cannot be understood, or cannot happen in this run."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing when no name is near."""
    near = nearest_name(given, allowed)
    return f"; did you mean {near!r}?" if near else ""


def nearest_name(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like the given one, if any does."""
    by_lower = {name.lower(): name for name in allowed}
    near = get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None
