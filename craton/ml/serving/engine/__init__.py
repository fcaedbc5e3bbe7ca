"""The engine: requests in, tokens out, one step at a time, and the process around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.engine.build import build_engine, build_runner, bytes_of_block, join_engine
    from craton.ml.serving.engine.engine_process import EngineProcess, tell_failure
    from craton.ml.serving.engine.machine import measured_machine
    from craton.ml.serving.engine.measurements import Latencies, Rates
    from craton.ml.serving.engine.planned_steps import PlannedSteps
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
