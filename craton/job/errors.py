"""Errors a user can cause and fix; the CLI prints each as one line and exits with 2.

CratonError(ValueError)            the root of the exception trees of all packages
└── JobError                       a job file, a cluster file or a model cannot be used
    ├── FileError                  the file cannot be read as YAML at all (missing, too large, duplicate key, ...)
    ├── ContentError               it is YAML, but keys or values are wrong; `.problems` lists every one
    │   └── SchemaError            a newer Craton wrote it
    ├── ModelError                 a model name, folder or config.json is not usable
    ├── LayoutError                a layout does not fit the model, the batch or the number of GPUs
    ├── FaultError                 a fault to inject cannot be parsed, or cannot happen in this run
    └── StrategyError              a strategy of test-time compute cannot be parsed, or is beyond its bounds
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.errors import CratonError
from craton.nearest import did_you_mean, nearest_name

__all__ = [
    "ContentError",
    "CratonError",
    "FaultError",
    "FileError",
    "JobError",
    "LayoutError",
    "ModelError",
    "SchemaError",
    "StrategyError",
    "did_you_mean",
    "nearest_name",
]


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


class SchemaError(ContentError):
    """The file has a schema that this version does not support."""


class ModelError(JobError):
    """A model name, folder or config.json is not usable."""


class LayoutError(JobError):
    """A layout does not fit the model, the batch or the number of GPUs."""


class FaultError(JobError):
    """A fault to inject cannot be parsed, or cannot happen in this run."""


class StrategyError(JobError):
    """A strategy of test-time compute cannot be parsed, or is beyond its bounds."""
