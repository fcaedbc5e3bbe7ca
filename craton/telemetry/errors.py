"""Errors of runs and their files that a user can cause and fix; the CLI prints each on one line and exits with 2.

CratonError(ValueError)
└── RunError                a run directory cannot be used
    ├── RunExistsError      the name is taken by another run
    ├── RunNotFoundError    no run has this name or path
    └── SinkError           a tracker's package is missing, or its name is unknown
"""

from __future__ import annotations

from craton.errors import CratonError


class RunError(CratonError):
    """A run directory cannot be used."""


class RunExistsError(RunError):
    """The name is taken by another run."""


class RunNotFoundError(RunError):
    """No run has this name or path."""


class SinkError(RunError):
    """A tracker's package is missing, or its name is unknown."""
