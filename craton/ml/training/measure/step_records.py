"""Records of the newest steps, carried by every checkpoint until they are in the run's metrics.

An agent records a step's loss one step late, through a pipe, so a kill on the way loses it, while the state after that
step may be safe in memory or on disk. So a checkpoint carries the records of its own step and of those before it that
rank 0's agent has not written yet. A restore then records what is missing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from craton.ml.training.measure.timing import HostCopy
from craton.telemetry import RunDirectory
from craton.telemetry.files import tail_lines
from craton.telemetry.rank import Recorder

MAX_RECORDS = 256  # carried by a checkpoint: an agent that hangs for longer is replaced
SEARCHED_BYTES = 4 << 20  # of each node's metrics, to find the newest steps

Record = dict[str, Any]  # step, loss, gradient_norm, learning_rate, what objective and loader report


@dataclass(frozen=True)
class _Step:
    step: int
    learning_rate: float
    numbers: HostCopy  # loss, gradient norm, this rank's own norm, whether the step counted, then the report
    report_names: tuple[str, ...]
    loaded: Mapping[str, float]  # metrics of its batches, such as the reward of rollouts

    @cached_property
    def record(self) -> Record:
        loss, norm, _, _, *report = self.numbers.read()
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": self.learning_rate}
        values |= {**dict(zip(self.report_names, report, strict=True)), **self.loaded}
        return {"step": self.step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}


@dataclass(frozen=True)
class _Carried:
    """From a restored checkpoint."""

    step: int
    record: Record


class StepRecords:
    """Created by every rank, with the same input on all of them, except for times that a rank measured."""

    def __init__(self) -> None:
        self._steps: deque[_Step | _Carried] = deque(maxlen=MAX_RECORDS)

    def add(
        self, step: int, learning_rate: float, numbers: HostCopy, report_names: list[str], loaded: Mapping[str, float]
    ) -> None:
        self._steps.append(_Step(step, learning_rate, numbers, tuple(report_names), loaded))

    def written(self, step: int) -> None:
        """Mark the records up to this step as written to disk."""
        while self._steps and self._steps[0].step <= step:
            self._steps.popleft()

    def begin(self, counters: Mapping[str, Any] | None) -> None:
        """Continue from these counters, and keep carrying the records of their checkpoint."""
        self._steps.clear()
        self._steps.extend(_Carried(int(record["step"]), record) for record in (counters or {}).get("records") or ())

    def later(self) -> Callable[[], list[Record]]:
        """Return a function that reads the current records once the device has sent them."""
        steps = tuple(self._steps)
        return lambda: [step.record for step in steps]


def resolved(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters with the values that were unknown when they were created."""
    return {name: value() if callable(value) else value for name, value in counters.items()}


def record_missing(run: RunDirectory, recorder: Recorder, records: list[Record]) -> list[int]:
    """Record the steps that are missing from the run's metrics; return them."""
    wanted = {int(record["step"]): record for record in records}
    for path in sorted((run.path / "metrics").glob("*.jsonl")) if wanted else ():
        for line in tail_lines(path, SEARCHED_BYTES):
            if "run_loss" in line and type(step := line.get("step")) is int:
                wanted.pop(step, None)
    for step, record in sorted(wanted.items()):
        recorder.metrics(step, **{f"run_{name}": value for name, value in record.items() if name != "step"})
    return sorted(wanted)
