"""What can go wrong between a job and its run.

craton.telemetry.RunError
├── StartError          the job cannot be started: where it should run, memory, layout, secrets
├── RunStateError       the verb does not fit the state the run is in
│   ├── RunEndedError   it has ended, however it did
│   └── UnsavedError    it was told to stop and cannot save its state
└── SchedulerError      Slurm or Kubernetes cannot be asked, or refuses
    └── NoAnswerError   whether it did what it was asked is not known
"""

from __future__ import annotations

from craton.telemetry import RunError, RunSummary


class StartError(RunError):
    """The job cannot be started as asked."""


class RunStateError(RunError):
    """The verb does not fit the state the run is in."""


class RunEndedError(RunStateError):
    """The verb is for runs that run, and this one has ended."""

    def __init__(self, message: str, summary: RunSummary) -> None:
        super().__init__(message)
        self.summary = summary


class UnsavedError(RunStateError):
    """The run was told to stop and stays up, because its state cannot be saved."""

    def __init__(self, message: str, summary: RunSummary) -> None:
        super().__init__(message)
        self.summary = summary


class SchedulerError(RunError):
    """The scheduler cannot be asked, or does not do what it is asked."""


class NoAnswerError(SchedulerError):
    """The scheduler did not answer in time: it may have done what it was asked."""
