"""Measurements of a step: times by phase, device counters read one step later, and step records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.training.measure.batches import BatchStatistics
    from craton.ml.training.measure.meter import Meter, PlannedStep, peak_memory_bytes
    from craton.ml.training.measure.step_records import StepRecords, record_missing, resolved
    from craton.ml.training.measure.timing import HostCopy, Readout, StepTimer
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
