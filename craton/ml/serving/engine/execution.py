"""Steps between the engine and its device: what runs them, and what was started and not yet read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from craton.ml.serving.device import StepResult
from craton.ml.serving.schedule import ScheduledStep, StepInput


class Executor(Protocol):
    """Runs steps: one device, or a tensor-parallel group."""

    def execute(self, work: StepInput) -> StepResult: ...


@dataclass(slots=True)
class InFlightStep:
    """A step that was started and not yet read back."""

    step: ScheduledStep
    work: StepInput
    result: StepResult
    version: int
