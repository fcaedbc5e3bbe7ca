"""Errors of orchestration.

craton.telemetry.RunError
├── StartError          the job cannot be started: backend, memory, layout, secrets
├── RunStateError       the verb does not fit the run's state
│   ├── RunEndedError   the run has ended
│   └── UnsavedError    the run is stopping and cannot save its state
└── SchedulerError      Slurm or Kubernetes is unreachable, or refuses
    └── NoAnswerError   no response: the request may still be executed
"""

from __future__ import annotations

from craton.telemetry import RunError, RunSummary


class StartError(RunError):
    """The job cannot be started as requested."""


class RunStateError(RunError):
    """The verb does not fit the run's state."""


class RunEndedError(RunStateError):
    """The verb needs a running run, and this one has ended."""

    def __init__(self, message: str, summary: RunSummary) -> None:
        super().__init__(message)
        self.summary = summary


class UnsavedError(RunStateError):
    """The run received a stop but keeps running, because its state cannot be saved."""

    def __init__(self, message: str, summary: RunSummary) -> None:
        super().__init__(message)
        self.summary = summary


class SchedulerError(RunError):
    """The scheduler is unreachable, or refuses a request."""


class SilentSchedulerError(SchedulerError):
    """The scheduler cannot be reached."""


class NoAnswerError(SilentSchedulerError):
    """The scheduler did not respond in time: it may still execute the request."""
