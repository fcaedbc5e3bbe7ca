"""What can go wrong between a job and its run.

craton.telemetry.RunError
├── StartError          the job cannot be started: where it should run, memory, layout, secrets
└── RunStateError       the verb does not fit the state the run is in
"""

from __future__ import annotations

from craton.telemetry import RunError


class StartError(RunError):
    """The job cannot be started as asked."""


class RunStateError(RunError):
    """The verb does not fit the state the run is in."""
