"""The whole run: storage, goodput, wall time and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.economics.cost import billed_instances, cost_plan
    from craton.planning.economics.goodput import goodput_plan
    from craton.planning.economics.outcome import (
        DEFAULT_CHECKPOINT_SECONDS,
        RunOutcome,
        durable_tier,
        evaluate_seconds,
        other_hardware,
        outcome_of,
        scaling_outcomes,
        stalls,
        storage_of,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
