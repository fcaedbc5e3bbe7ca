"""Predict a job before it runs, with intervals; offline and deterministic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.planner import plan, plan_clusters
    from craton.planning.result import CostPlan, Plan
    from craton.planning.setting import PlanError, placed_step_seconds
    from craton.planning.software import CONSTANTS
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
